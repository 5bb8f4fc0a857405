"""launch/prepare_dapo_data.sh: both files in one go, kept when there, made again when asked."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_both_files_once_and_again_on_request(tmp_path):
    for name in ("dapo-math-17k", "aime-2024"):
        rows = (prompt_row("math_dapo", f"{name} {i % 4}", "1", index=i, split="t") for i in range(12))
        write_rows(tmp_path / "from" / f"{name}.parquet", rows, PROMPT_SCHEMA)

    def run(**variables: str) -> str:
        env = {**os.environ, "PYTHON": sys.executable, "FROM_DIR": str(tmp_path / "from"), **variables}
        script = [str(ROOT / "launch" / "prepare_dapo_data.sh")]
        return subprocess.run(script, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    target = {"VERL_HOME": str(tmp_path / "home")}
    assert run(**target).count("12 rows read, 8 duplicates removed") == 2
    data = tmp_path / "home" / "data"
    assert {path.name for path in data.glob("*.parquet")} == {"dapo-math-17k.parquet", "aime-2024.parquet"}
    assert pyarrow.parquet.read_metadata(data / "aime-2024.parquet").num_rows == 4
    before = (data / "aime-2024.parquet").stat().st_mtime_ns
    assert run(**target).count("is there already") == 2
    assert (data / "aime-2024.parquet").stat().st_mtime_ns == before
    run(**target, OVERWRITE="1")
    assert (data / "aime-2024.parquet").stat().st_mtime_ns > before
