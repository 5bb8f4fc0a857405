"""The streaming modes on the demo model: do they learn as the sync loop does, and how much of their work overlaps.

    python benchmarks/streaming.py overlap  [--demo DIR] [--steps 20] [--length 24] [--output FILE]
    python benchmarks/streaming.py accuracy [--demo DIR] [--steps 100] [--modes sync …] [--output FILE]

`overlap`: one trainer and two engines, each half of the cores; responses are lengthened to `--length` tokens so that
generation and training take about as long. The figure is wall time / (time the trainer worked + time an engine did).
`accuracy`: held-out accuracy before and after so many steps of every mode from the same warm start, one seed.
`--demo` names a directory in which `megatron-dapo demo` has made data and warm start; they are made where missing.
"""

import argparse
import json
import tempfile
from pathlib import Path

from megatron_dapo.cli.demo import Demo, training_overrides, warm_start_overrides, write_inputs
from megatron_dapo.metrics import METRICS_FILE, read_jsonl
from megatron_dapo.runtime.launcher import launch

ACCURACY = "val-core/"
WARMUP = 3
ONE_RANK = (
    *("parallel.world_size=1", "parallel.expert=1", "trainer.logger=[jsonl]", "trainer.save_freq=-1"),
    *("trainer.export_hf=false", "trainer.log_samples_every=-1", "rollout.kv_cache_gb=0.25"),
)


def prepared(directory: Path) -> Demo:
    demo = Demo(directory)
    if not demo.warm.exists():
        write_inputs(demo)
        if code := launch("megatron_dapo.sft", [*warm_start_overrides(demo), "parallel.world_size=1"], 1):
            raise SystemExit(code)
    return demo


def trained(demo: Demo, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every step of one run."""
    with tempfile.TemporaryDirectory() as directory:
        words = [*training_overrides(demo), *ONE_RANK, f"trainer.default_local_dir={directory}"]
        words += ["trainer.rollout_data_dir=null", *overrides]
        if code := launch("megatron_dapo.train", words, 1):
            raise SystemExit(code)
        return read_jsonl(Path(directory) / METRICS_FILE)


def overlap(demo: Demo, steps: int, length: int) -> dict[str, float]:
    rows = trained(
        demo,
        *(
            "trainer.mode=separate_async",
            "rollout.engines=2",
            "algorithm.filter_groups.enable=false",
            "data.gen_batch_size=null",
        ),
        *("rollout.ignore_eos=true", f"data.max_response_length={length}", "reward.overlong_buffer.enable=false"),
        *("data.val_files=[]", "trainer.test_freq=-1", f"trainer.total_training_steps={steps}"),
    )[WARMUP:]
    wall = sum(row["timing_s/step"] for row in rows)
    training = wall - sum(row["streaming/idle_s/trainer"] for row in rows)
    generation = wall - sum(row["streaming/idle_s/rollout"] for row in rows)
    return {
        "steps": len(rows),
        "wall_s": wall,
        "training_s": training,
        "generation_s": generation,
        "ratio": wall / (training + generation),
        "staleness": sum(row["training/off_policy/trajectory_staleness_worst/mean"] for row in rows) / len(rows),
    }


def accuracy(demo: Demo, steps: int, mode: str) -> dict[str, float]:
    rows = trained(demo, f"trainer.mode={mode}", f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}")
    found = [value for row in rows for name, value in row.items() if name.startswith(ACCURACY) and "/acc/mean" in name]
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return {"before": found[0], "after": found[-1], "step_s": sum(seconds) / len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overlap", "accuracy"))
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--modes", nargs="*", default=["sync", "colocate_async", "separate_async"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    demo = prepared(args.demo)
    if args.what == "overlap":
        result: dict = {"overlap": overlap(demo, args.steps, args.length)}
    else:
        result = {"accuracy": {mode: accuracy(demo, args.steps, mode) for mode in args.modes}, "steps": args.steps}
    print(json.dumps(result, indent=1))
    if args.output:
        known = json.loads(args.output.read_text()) if args.output.exists() else {}
        args.output.write_text(json.dumps(known | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
