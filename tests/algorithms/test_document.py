"""docs/algorithms.md says what there is: names against the registries, files against the tree, keys against the schema."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from megatron_dapo.algorithms import AGGREGATION_MODES, KL_KINDS, advantage_names, policy_loss_names
from megatron_dapo.config import Config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text()


def table() -> dict[str, list[list[str]]]:
    """The rows of the large table by section."""
    rows: dict[str, list[list[str]]] = {}
    section = ""
    for line in TEXT.split("## Table")[1].split("\n## ")[0].splitlines():
        if not line.startswith("|") or line.startswith(("|---", "| technique")):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == 5, line
        if cells[0].startswith("**"):
            section = cells[0].strip("*")
            rows[section] = []
        else:
            rows[section].append(cells)
    return rows


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Policy losses", policy_loss_names()),
        ("Loss aggregation", list(AGGREGATION_MODES)),
        ("Advantages", [name for name in advantage_names() if not name.startswith("test_")]),
        ("KL to the reference", list(KL_KINDS)),
    ],
)
def test_names_are_those_of_the_registry(section: str, names: list[str]) -> None:
    documented = [name for row in table()[section] for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(documented) == sorted(names)


def test_files_exist_and_every_file_of_a_technique_is_named() -> None:
    folder = ROOT / "megatron_dapo" / "algorithms"
    named = {row[2].strip("`") for rows in table().values() for row in rows}
    assert all((folder / name).is_file() for name in named)
    helpers = {
        "__init__.py",
        "base.py",
        "masked.py",
        "measured.py",
        "registry.py",
        "groups.py",
        "scan.py",
        "thresholds.py",
        "correct.py",
    }
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name not in helpers}
    assert files == named


def test_keys_exist_in_the_configuration() -> None:
    keys = [key for rows in table().values() for row in rows for key in re.findall(r"`([^`]+)`", row[3])]
    assert len(keys) > 60
    for key in keys:
        model: type[BaseModel] = Config
        for part in key.split("."):
            assert part in model.model_fields, f"{key}: {part}"
            annotation = model.model_fields[part].annotation
            model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else BaseModel
