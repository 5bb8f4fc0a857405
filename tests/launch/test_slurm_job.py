"""launch/slurm/job.sh with a SLURM of two shell scripts: when a job that was asked to stop goes back into the queue."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/bash
kill -USR1 $PPID
while [[ ! -e $STOP_FILE ]]; do sleep 0.05; done
exit $CODE
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo n1; else echo "$@" >>"$CALLS"; fi
"""


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (0, False)])
def test_only_a_job_that_has_not_finished_goes_back(tmp_path: Path, code: int, requeued: bool):
    calls, commands = tmp_path / "calls", {"srun": SRUN, "scontrol": SCONTROL}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "CALLS": str(calls), "LOG_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "REPOSITORY": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "launch/slurm/torchrun.sbatch"), "recipe=demo"],
        env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "phase: stop requested (SIGUSR1)" in done.stdout
    assert (calls.read_text() if calls.exists() else "") == ("requeue 7\n" if requeued else "")
