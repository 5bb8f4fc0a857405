"""The documentation lists the keys that exist, with the defaults that hold."""

from pathlib import Path

from megatron_dapo.config import Config
from megatron_dapo.config.document import key_tables, rewrite
from megatron_dapo.config.problems import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_is_up_to_date():
    assert PAGE.read_text() == rewrite(PAGE), "run `make docs`"


def test_every_key_has_a_row():
    tables = key_tables()
    assert "| `actor.clip_ratio_high` | `null` |" in tables
    assert "| `reward.on_failure` | `drop` |" in tables and "`drop` \\| `zero` \\| `raise`" in tables
    leaves = [key for key in all_keys(Config) if not any(other.startswith(key + ".") for other in all_keys(Config))]
    assert [key for key in leaves if f"| `{key}` |" not in tables] == []
