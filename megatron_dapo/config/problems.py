"""How a configuration is refused: every problem at once, each with its key, its value and what to do."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_dapo.errors import UserError

_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


@dataclass(frozen=True)
class Problem:
    """`key` has `value`; `text` says why that cannot be and what to do. `others` are the keys it was compared with."""

    key: str
    value: Any
    text: str
    others: tuple[str, ...] = ()


class ConfigError(UserError):
    """A configuration that cannot run; `problems` holds all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"The configuration has {count}:", *map(_entry, problems)]))


def _entry(problem: Problem) -> str:
    head = f"  {problem.key}" + ("" if problem.value is None else f" = {_show(problem.value)}")
    return f"{head}\n" + textwrap.fill(problem.text, 110, initial_indent="      ", subsequent_indent="      ")


def _show(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of every section and key below `model`."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def nearest(key: str, candidates: Sequence[str]) -> str | None:
    """The candidate that the writer of `key` most likely meant: spelling and words of the last part, then the path."""
    leaf = key.rpartition(".")[2]
    words = set(leaf.split("_"))

    def likeness(candidate: str) -> float:
        other = candidate.rpartition(".")[2]
        spelling = SequenceMatcher(None, leaf, other).ratio()
        shared = len(words.intersection(other.split("_"))) / len(words)
        return 0.5 * spelling + 0.25 * shared + 0.25 * SequenceMatcher(None, key, candidate).ratio()

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.5 else None


def from_validation(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Pydantic's findings as problems, one per key (the alternatives of a union are one)."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        key = _dotted(detail["loc"], model)
        found.setdefault(key, Problem(key, _value(detail), _text(key, detail, model)))
    return list(found.values())


def _dotted(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The path in our words; what pydantic appends below a key (union branches) is left out, list positions stay."""
    parts: list[str] = []
    section: type[BaseModel] | None = model
    for item in loc:
        if section is not None:
            parts.append(str(item))
            annotation = section.model_fields[item].annotation if item in section.model_fields else None
            section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        elif isinstance(item, int):
            parts[-1] += f"[{item}]"
    return ".".join(parts)


def _value(detail: ErrorDetails) -> Any:
    return None if detail["type"] == "missing" else detail["input"]


def _text(key: str, detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        near = nearest(key, all_keys(model))
        return "There is no such key." + (
            f" Did you mean {near}?" if near else " `megatron-dapo config` lists all keys."
        )
    if kind == "literal_error":
        near = nearest(str(detail["input"]), re.findall(r"'([^']*)'", context["expected"]))
        return (f"Did you mean {near}? " if near else "") + f"Must be one of {context['expected']}."
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"Must be {words} {context[name]}."
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "Is a section: set the keys below it, e.g. `" + key + ".KEY=VALUE`."
    return detail["msg"].removeprefix("Value error, ").rstrip(".").capitalize() + "."
