"""The data card: what a prepared file holds, printed when it is written and saved next to it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BINS = 12
BAR = 40  # characters of the longest histogram bar


@dataclass(frozen=True)
class Lengths:
    """Distribution of prompt lengths, in tokens of `tokenizer` or, without one, in characters."""

    unit: str
    mean: float
    percentiles: Mapping[str, int]  # min, p50, p90, p99, max
    histogram: Sequence[tuple[int, int, int]]  # from, up to but not including, rows
    limit: int
    over_limit: int

    @classmethod
    def of(cls, lengths: np.ndarray, unit: str, limit: int) -> "Lengths":
        """Summarise an array of lengths; `limit` is in the same unit."""
        edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, BINS + 1).astype(int))
        counts, _ = np.histogram(lengths, edges)
        named = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
        return cls(
            unit=unit,
            mean=round(float(lengths.mean()), 2),
            percentiles={name: int(np.percentile(lengths, q)) for name, q in named.items()},
            histogram=[(int(a), int(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)],
            limit=limit,
            over_limit=int((lengths > limit).sum()),
        )

    def text(self) -> str:
        """A line of percentiles, a histogram, and how many prompts are too long."""
        lines = [f"  prompt length in {self.unit}: mean {self.mean:g}, "]
        lines[0] += ", ".join(f"{name} {value}" for name, value in self.percentiles.items())
        most = max(count for *_, count in self.histogram)
        for low, high, count in self.histogram:
            lines.append(f"  {low:>7} to {high - 1:>7} {count:>8} {'#' * -(-BAR * count // most)}")
        lines.append(f"  longer than {self.limit} {self.unit}: {self.over_limit}")
        return "\n".join(lines)


@dataclass(frozen=True)
class FileCard:
    """One written file. `copies` says how often its source repeats a problem: {copies: problems}."""

    path: str
    rows_read: int
    rows_written: int
    conflicts: int  # problems that occur with more than one ground truth; the first one is kept
    copies: Mapping[int, int]
    data_sources: Mapping[str, int]
    lengths: Lengths | None

    @property
    def duplicates(self) -> int:
        return self.rows_read - self.rows_written

    @property
    def suggested_n(self) -> int | None:
        """Samples per prompt that stand for the copies, when every problem has the same number of them."""
        (only,) = self.copies if len(self.copies) == 1 else (1,)
        return only if only > 1 else None

    def text(self) -> str:
        sources = ", ".join(f"{name} ({rows})" for name, rows in self.data_sources.items())
        lines = [f"{self.path}: {self.rows_written} prompts of {sources}"]
        lines.append(f"  {self.rows_read} rows read, {self.duplicates} duplicates removed")
        if self.conflicts:
            lines.append(f"  {self.conflicts} problems had several ground truths; the first of each was kept")
        if self.suggested_n is not None:
            lines.append(
                f"  every problem came {self.suggested_n} times (to evaluate, sample n={self.suggested_n} of each)"
            )
        if self.lengths is not None:
            lines.append(self.lengths.text())
        return "\n".join(lines)


@dataclass(frozen=True)
class DataCard:
    """What one `prepare` wrote."""

    name: str
    source: str
    files: Sequence[FileCard]
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def text(self) -> str:
        """The card for people."""
        head = f"{self.name} from {self.source} in {self.seconds:.1f} s"
        return "\n".join([head, *(file.text() for file in self.files)])

    def save(self, path: Path) -> None:
        """The card for programs: JSON, with duplicates and the suggested n spelled out."""
        content = asdict(self)
        for record, file in zip(content["files"], self.files, strict=True):
            record |= {"duplicates": file.duplicates, "suggested_n": file.suggested_n}
        path.write_text(json.dumps(content, indent=2) + "\n")


def removed_copies(file: Path) -> int:
    """How often each problem of a prepared file came before copies were removed, by the newest card beside it; else 1.

    A card is found by what it says it describes: one card may be about several files.
    """
    cards = sorted(file.parent.glob("*.card.json"), key=lambda card: card.stat().st_mtime, reverse=True)
    for card in cards:
        for record in json.loads(card.read_text())["files"]:
            if Path(record["path"]).name == file.name:
                return record["suggested_n"] or 1
    return 1
