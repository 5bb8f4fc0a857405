"""What holds for every test: few threads (many tests start many processes), nothing from the network, GPU tests only on one."""

import os
import shutil
import sys
from pathlib import Path

import pytest

# Dozens of tests start processes that import vLLM, ranks and engines: 7 s each from bytecode, 40 s without.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # or a token in the home directory would decide about clusters of one machine
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)  # before anything imports torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def shared_data() -> Path:
    """The real data files that lie beside the checkout (or beside its worktrees); read in place, never committed."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "data").is_dir():
            return parent / "shared" / "data"
    pytest.skip("no shared/data beside this checkout")
