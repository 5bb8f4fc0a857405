"""Which transformer layers each pipeline stage and virtual chunk holds: pure arithmetic, in Megatron's order."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What one chunk of one pipeline rank holds: global layer numbers from 0, and the two ends of the model."""

    pp: int
    chunk: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool


def split_layers(
    layers: int,
    pipeline: int,
    virtual_pipeline: int | None = None,
    first: int | None = None,
    last: int | None = None,
    layout: str | None = None,
) -> tuple[Stage, ...]:
    """All stages, chunk by chunk and pipeline rank by pipeline rank (the order in which a token visits them).

    `first` and `last` are the layer counts of the first and last pipeline rank; the rest share evenly. `layout` is
    Megatron's string, one group of letters per stage ("Ett|tt|tL"; E embedding, t layer, L loss), and overrides them.
    Raises ValueError naming the numbers when the layers cannot be divided so.
    """
    chunks = virtual_pipeline or 1
    if layout is not None:
        groups = parse_layout(layout)
        if len(groups) != pipeline * chunks:
            raise ValueError(
                f"pipeline_layout {layout!r} has {len(groups)} stages, but pipeline {pipeline} x virtual_pipeline "
                f"{chunks} needs {pipeline * chunks}"
            )
        counts = [group.count("t") for group in groups]
        if sum(counts) != layers:
            raise ValueError(f"pipeline_layout {layout!r} places {sum(counts)} layers, but the model has {layers}")
        ends = [("E" in group, "L" in group) for group in groups]
        if not (ends[0][0] and ends[-1][1]):
            raise ValueError(f"pipeline_layout {layout!r} must begin with E (embedding) and end with L (loss)")
    else:
        ranks = _layers_per_rank(layers, pipeline, first, last)
        uneven = [n for n in ranks if n % chunks]
        if uneven:
            raise ValueError(f"{uneven[0]} layers of a pipeline stage do not divide into virtual_pipeline {chunks}")
        counts = [n // chunks for _ in range(chunks) for n in ranks]
        ends = [(i == 0, i == len(counts) - 1) for i in range(len(counts))]
    stages, start = [], 0
    for i, (count, (embedding, head)) in enumerate(zip(counts, ends, strict=True)):
        stages.append(Stage(i % pipeline, i // pipeline, tuple(range(start, start + count)), embedding, head))
        start += count
    return tuple(stages)


def parse_layout(layout: str) -> list[str]:
    """Expand "E|(tt|)*2,tL" into one string of letters per stage."""
    text = layout.replace(",", "").replace(" ", "")
    text = re.sub(r"\(([^()]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    wrong = set(text) - set("EtmL|")
    if wrong:
        raise ValueError(f"pipeline_layout {layout!r} contains {sorted(wrong)}; known letters are E, t, m, L and |")
    return text.split("|")


def _layers_per_rank(layers: int, pipeline: int, first: int | None, last: int | None) -> list[int]:
    if pipeline == 1:
        return [layers]
    given = (first or 0) + (last or 0)
    middle = pipeline - (first is not None) - (last is not None)
    rest = layers - given
    if rest < 0 or (middle == 0 and rest) or (middle and (rest % middle or not rest)):
        raise ValueError(
            f"{layers} layers do not divide over pipeline {pipeline} with first_stage_layers {first} and "
            f"last_stage_layers {last}: {rest} layers for {middle} even stages"
        )
    each = rest // middle if middle else 0
    ranks = [each] * pipeline
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return ranks
