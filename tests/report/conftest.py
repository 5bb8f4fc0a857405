"""Example runs, written once for all tests of the report."""

import pytest

from tests.report.example_run import write_example, write_experts


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    path = write_example(tmp_path_factory.mktemp("runs") / "dapo-moe", steps=30)
    write_experts(path, steps=(10, 30), tokens=120)
    return path


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("runs") / "plain", "plain", steps=30, seed=1, rate=0.6)
