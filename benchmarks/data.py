"""Preparing a data set the size of published DAPO-Math-17k (17,000 problems, about 100 copies each): time and memory.

Run: python benchmarks/data.py [--copies 100]. Writes benchmarks/results/data.json.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "data.json"
PROBLEMS = 17_000


def rows(copies: int) -> Iterator[dict]:
    """Every problem `copies` times, in rounds, as the published file is shuffled. A problem has ~350 characters."""
    from megatron_dapo.data.schema import prompt_row
    from megatron_dapo.data.sources import DAPO_INSTRUCTION

    words = "integer triangle circle radius length find the sum of all real numbers such that polynomial"
    vocabulary = words.split()
    rng = random.Random(0)
    problems = [" ".join(rng.choices(vocabulary, k=50)) + f" {i}" for i in range(PROBLEMS)]
    for _ in range(copies):
        rng.shuffle(problems)
        for problem in problems:
            index = int(problem.rpartition(" ")[2])
            text = DAPO_INSTRUCTION.format(problem=problem)
            yield prompt_row("math_dapo", problem, str(index), index=index, split="train", text=text)


def measured(source: Path, output: Path) -> dict[str, float]:
    """Prepare in a process of its own, to read its peak memory."""
    script = (
        "import sys, json, resource\nfrom pathlib import Path\nfrom megatron_dapo.data.prepare import prepare\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "card = prepare('dapo-math-17k', Path(sys.argv[2]), Path(sys.argv[1]))\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "file = card.files[0]\n"
        "print(json.dumps({'seconds': card.seconds, 'rows': file.rows_read, 'kept': file.rows_written,\n"
        "                  'imports_mib': base / 1024, 'peak_mib': peak / 1024}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(output)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Make the file, prepare it, print and save the figures."""
    from megatron_dapo.data.schema import PROMPT_SCHEMA, write_rows

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=100)
    copies = parser.parse_args().copies
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "raw.parquet"
        began = time.monotonic()
        write_rows(source, rows(copies), PROMPT_SCHEMA)
        print(f"made {source.stat().st_size / 2**20:.0f} MiB in {time.monotonic() - began:.0f} s")
        figures = measured(source, Path(scratch) / "out")
        figures["file_mib"] = source.stat().st_size / 2**20
    figures = {key: round(value, 1) for key, value in figures.items()} | {
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
