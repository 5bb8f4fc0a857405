"""Sums: a task that a two-million-parameter model can learn in minutes, written as ordinary prompt and SFT files.

The files use the DAPO-Math-17k schema and the `math_dapo` verifier scores them, so nothing about them is special.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import PROMPT_SCHEMA, SFT_SCHEMA, prompt_row, write_rows

OPERATORS = "+-*"


@dataclass(frozen=True)
class Arithmetic:
    """Sizes of the splits and the range of the problems.

    The splits are disjoint as *unordered* pairs of operands: if 12+45 is held out, neither 12+45 nor 45+12 is trained.
    """

    train_rows: int = 4096
    val_rows: int = 256
    sft_rows: int = 4096
    sft_val_rows: int = 256
    max_operand: int = 99
    operators: str = "+"
    zero_pad: bool = False  # "07+45=?": fixed width is easier to learn
    data_source: str = "math_dapo"
    seed: int = 1

    def __post_init__(self) -> None:
        unknown = set(self.operators) - set(OPERATORS)
        if unknown or not self.operators:
            raise DataError(f"arithmetic: operators={self.operators!r} must be one or more of {OPERATORS!r}")
        if self.max_operand < 1:
            raise DataError(f"arithmetic: max_operand={self.max_operand} must be at least 1")


def write_arithmetic(output: Path, options: Arithmetic | None = None) -> dict[str, Path]:
    """Write `train`, `val` (prompt files), `sft` and `sft_val` (prompt and response columns) and return their paths.

    Raises DataError when the operand range has too few distinct problems for the rows asked for.
    """
    options = options or Arithmetic()
    sizes = {
        "sft": options.sft_rows,
        "train": options.train_rows,
        "val": options.val_rows,
        "sft_val": options.sft_val_rows,
    }
    problems = _problems(options)
    if sum(sizes.values()) > len(problems):
        raise DataError(
            f"arithmetic: {sum(sizes.values())} rows wanted, but operands up to {options.max_operand} with operators "
            f"{options.operators!r} give {len(problems)} distinct problems; raise max_operand or lower the row counts"
        )
    paths, start = {}, 0
    for split, size in sizes.items():
        chosen = problems[start : start + size]
        start += size
        # The two orders of a pair lie next to each other: skip the partner of the last problem, it would be a leak.
        while 0 < start < len(problems) and _pair(problems[start]) == _pair(problems[start - 1]):
            start += 1
        if len(chosen) < size:
            raise DataError(f"arithmetic: only {len(chosen)} of {size} {split} rows are left; raise max_operand")
        random.Random(options.seed).shuffle(chosen)
        paths[split] = output / f"{split}.parquet"
        if split.startswith("sft"):
            write_rows(paths[split], _sft_rows(chosen, options), SFT_SCHEMA)
        else:
            write_rows(paths[split], _prompt_rows(chosen, split, options), PROMPT_SCHEMA)
    return paths


Problem = tuple[int, str, int]


def _problems(options: Arithmetic) -> list[Problem]:
    """Every problem once, in a seeded order that keeps the orders of one pair together."""
    pairs = [(a, b) for a in range(options.max_operand + 1) for b in range(a, options.max_operand + 1)]
    random.Random(options.seed).shuffle(pairs)
    return [
        problem
        for a, b in pairs
        for operator in options.operators
        for problem in ([(a, operator, b)] if a == b else [(a, operator, b), (b, operator, a)])
    ]


def _pair(problem: Problem) -> tuple[int, int]:
    return min(problem[0], problem[2]), max(problem[0], problem[2])


def _question(problem: Problem, options: Arithmetic) -> str:
    width = len(str(options.max_operand)) if options.zero_pad else 0
    left, operator, right = problem
    return f"{left:0{width}d}{operator}{right:0{width}d}=?"


def _answer(problem: Problem) -> str:
    left, operator, right = problem
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def _prompt_rows(problems: list[Problem], split: str, options: Arithmetic) -> Iterator[dict]:
    for index, problem in enumerate(problems):
        yield prompt_row(options.data_source, _question(problem, options), _answer(problem), index=index, split=split)


def _sft_rows(problems: list[Problem], options: Arithmetic) -> Iterator[dict]:
    for problem in problems:
        yield {"prompt": _question(problem, options), "response": f"Answer: {_answer(problem)}"}
