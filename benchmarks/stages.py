"""How a run's steady step splits into stages: medians over its steps, from the metrics.jsonl that every run writes.

python benchmarks/stages.py runs/demo runs/smollm2_135m --output benchmarks/results/stages.json
"""

import argparse
import json
import statistics
from pathlib import Path

from megatron_dapo.metrics import METRICS_FILE, read_jsonl

WARMUP = 3
GENERATION = ("gen",)
FORWARD_BACKWARD = ("old_log_prob", "ref", "values", "update_actor", "update_critic")
NOT_A_STEP = ("testing", "save_checkpoint")  # due every so many steps, so a steady step has neither


def split(directory: Path) -> dict:
    """Median seconds per stage, and the share of the step that is neither generation nor forward and backward."""
    rows = [row for row in read_jsonl(directory / METRICS_FILE) if "timing_s/step" in row][WARMUP:]
    if not rows:
        raise SystemExit(f"{directory / METRICS_FILE} has no more than {WARMUP} steps: train longer")
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")})
    seconds = {
        name.removeprefix("timing_s/"): [row.get(name, 0.0) for row in rows]
        for name in names
        if name.removeprefix("timing_s/") not in NOT_A_STEP
    }
    rare = [sum(row.get(f"timing_s/{name}", 0.0) for name in NOT_A_STEP) for row in rows]
    steps = [step - other for step, other in zip(seconds.pop("step"), rare, strict=True)]
    worked = sum(sum(seconds.get(name, [])) for name in GENERATION + FORWARD_BACKWARD)
    return {
        "steps": len(rows),
        "step_s": round(statistics.median(steps), 4),
        "stage_s": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "share_neither_generation_nor_forward_backward": round(1 - worked / sum(steps), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {directory.name: split(directory) for directory in arguments.runs}
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
