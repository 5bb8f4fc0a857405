"""What the driver of a streaming run does per step besides waiting, by size of the batch; and the queue's speed.

    python benchmarks/controller.py [--queue] [--output benchmarks/results/controller.json]

A step of `prompts` groups of 16 samples: draws are issued, settle (a quarter without signal, replaced), are taken by
age and closed in the ledger. `--queue` measures TransferQueue beside it: rows of 512 tokens, put and read in batches as
the feed and the trainer do. What counts: microseconds per sample, and that they do not grow.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.data.types import Prompt, Score, Trajectory
from megatron_dapo.runtime import rows
from megatron_dapo.trainers.ledger import Ledger
from megatron_dapo.trainers.replay import ReplayBuffer, ReplayPolicy

if TYPE_CHECKING:
    from megatron_dapo.runtime.queue import Queue

SAMPLES, STEPS, TOKENS = 16, 3, 512


def controller(prompts: int, strategy: str) -> dict[str, float]:
    """Driver seconds of one step in the middle of a run."""
    policy = ReplayPolicy(batch_size=prompts, ahead=1, max_span=8, strategy=strategy, filter=True)
    signal, none = tuple([0.0, 1.0] * (SAMPLES // 2)), (1.0,) * SAMPLES
    with tempfile.TemporaryDirectory() as directory:
        buffer, ledger = ReplayBuffer(policy), Ledger(Path(directory) / "ledger.jsonl")
        drawn, under_way, best = 0, [], float("inf")
        for step in range(1, STEPS + 1):
            start = time.perf_counter()
            buffer.begin(step)
            while (taken := buffer.take(prompts)) is None:
                fresh = [f"0-{drawn + i}-0" for i in range(buffer.need())]
                drawn += len(fresh)
                buffer.issue(fresh)
                ledger.issue(fresh)
                under_way += fresh
                arrived, under_way = under_way[: prompts // 2], under_way[prompts // 2 :]
                for index, uid in enumerate(arrived):
                    if (outcome := buffer.settle(uid, none if index % 4 == 0 else signal)) is not None:
                        ledger.close(uid, outcome, step)
            for uid in taken:
                ledger.close(uid, "trained", step)
            ledger.flush()
            best = min(best, time.perf_counter() - start)
        ledger.end()
    return {
        "ms_per_step": best * 1e3,
        "us_per_sample": best * 1e6 / (prompts * SAMPLES),
        "us_per_prompt": best * 1e6 / prompts,
    }


def queue_speed() -> list[dict[str, float]]:
    """Milliseconds per call and megabytes per second of putting, scoring, reading and clearing rows."""
    import ray

    from megatron_dapo.runtime.queue import Queue

    ray.init("local", num_cpus=3, object_store_memory=100 * 2**20, include_dashboard=False, logging_level="ERROR")
    queue = Queue.open(storage_units=1)
    found = [one_batch(queue, count) for count in (16, 128, 1024)]
    queue.close()
    ray.shutdown()
    return found


def one_batch(queue: "Queue", count: int) -> dict[str, float]:
    prompt = Prompt("0-0-0", 0, 0, 0, tuple(range(64)), ({"role": "user", "content": "?"},), "math", "4")
    numbers = (7,) * TOKENS, (-0.5,) * TOKENS, "stop", (1,) * TOKENS
    made = [Trajectory(prompt.uid, i, *numbers) for i in range(count)]
    keys = [rows.trajectory_key(prompt.uid, i) for i in range(count)]

    def put() -> None:
        cells, tags = map(rows.trajectory_row, made), (rows.trajectory_tags(prompt, one) for one in made)
        queue.put(dict(zip(keys, cells, strict=True)), dict(zip(keys, tags, strict=True)))

    def score() -> None:
        queue.put({key: rows.score_row(Score(1.0, 1.0, 1.0)) for key in keys})

    def read() -> None:
        for row in queue.get(keys, rows.ROLLOUT_FIELDS):
            rows.read_trajectory(row)

    seconds: dict[str, float] = {}
    for _ in range(3):
        for work in (put, score, read, queue.tags, lambda: queue.clear(keys)):
            start = time.perf_counter()
            work()
            spent = time.perf_counter() - start
            seconds[work.__name__] = min(seconds.get(work.__name__, spent), spent)
    seconds["clear"] = seconds.pop("<lambda>")
    megabytes = count * TOKENS * 13 / 1e6
    speed = {f"{name}_mb_per_s": megabytes / seconds[name] for name in ("put", "read")}
    return {"rows": count} | {f"{name}_ms": value * 1e3 for name, value in seconds.items()} | speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queue", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, list[dict[str, float]]] = {}
    for strategy in ("drop", "wait"):
        result[strategy] = [
            {"prompts": prompts} | controller(prompts, strategy) for prompts in (512, 1024, 2048, 4096, 8192, 16384)
        ]
        for row in result[strategy]:
            print(strategy, {name: round(value, 2) for name, value in row.items()})
    worst = max(row["us_per_sample"] for strategy in result.values() for row in strategy)
    print(f"worst: {worst:.2f} µs per sample (bound: 20)")
    if args.queue:
        result["queue"] = queue_speed()
        for row in result["queue"]:
            print({name: round(value, 1) for name, value in row.items()})
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
