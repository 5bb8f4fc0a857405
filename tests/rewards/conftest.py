"""The real data files next to the checkout; their tests are skipped where they are absent."""

from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Path:
    path = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no data files at {path}")
    return path
