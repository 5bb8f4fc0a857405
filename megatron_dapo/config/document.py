"""Writes the table of all keys into docs/configuration.md, from the schema itself."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from megatron_dapo.config.evaluation import EvalConfig
from megatron_dapo.config.schema import Config

BEGIN, END = "<!-- keys: begin (made by `make docs`) -->", "<!-- keys: end -->"


def key_tables(model: type[BaseModel] = Config) -> str:
    """One Markdown table per section: key, default, meaning, allowed words."""
    parts = []
    for name, field in model.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        rows = "\n".join(_rows(section, f"{name}.", field.default))
        parts.append(f"### {name}\n\n{_summary(section)}\n\n| key | default | meaning |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def eval_table() -> str:
    """The keys of `megatron-dapo eval`, which has no sections but `reward`, the run's own."""
    rows = "\n".join(row for row in _rows(EvalConfig, "", EvalConfig()) if not row.startswith("| `reward."))
    about = "The words of `megatron-dapo eval`; `reward.*` as above."
    return f"### eval\n\n{about}\n\n| key | default | meaning |\n| --- | --- | --- |\n{rows}\n"


def _summary(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().split("\n\n")[0]


def _rows(section: type[BaseModel], prefix: str, defaults: BaseModel) -> Iterator[str]:
    for name, field in section.model_fields.items():
        default = defaults.__dict__[name]
        if isinstance(default, BaseModel):
            yield from _rows(type(default), f"{prefix}{name}.", default)
        else:
            words = _words(field.annotation)
            meaning = (field.description or "") + (" (" + " \\| ".join(words) + ")" if words else "")
            yield f"| `{prefix}{name}` | `{_show(default)}` | {' '.join(meaning.split())} |"


def _words(annotation: Any) -> list[str]:
    """The allowed words of a Literal, also inside a tuple; none for one that its meaning explains word by word."""
    if get_origin(annotation) is Literal:
        return [f"`{word}`" for word in get_args(annotation)]
    return [word for inner in get_args(annotation) for word in _words(inner)]


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if value != "" else "''"


def rewrite(path: Path) -> str:
    """The page with its tables brought up to date."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{key_tables()}\n{eval_table()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewrite(page), encoding="utf-8")
