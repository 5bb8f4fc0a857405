"""A run directory as a trainer leaves it, with plausible curves: 16×8 GPUs, an MoE of 24 layers and 128 experts."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

from megatron_dapo.metrics import JsonlWriter, MoELoadAccumulator, MoELog, megatron_placement, moe_report

LAYERS, EXPERTS, GPUS = 24, 128, 128
STAGES = {
    "gen": 21.0,
    "reward": 1.2,
    "old_log_prob": 5.0,
    "ref": 3.5,
    "adv": 0.3,
    "update_actor": 14.0,
    "update_weights": 1.1,
}


def write_example(run_dir: Path, name: str = "dapo-moe", steps: int = 120, seed: int = 0, rate: float = 1.0) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    writer = JsonlWriter(run_dir / "metrics.jsonl")
    writer.write({"step": 0, "val-core/aime-2024/acc/mean@32": 0.08, "val-core/aime-2024/acc/maj@32/mean": 0.11})
    for step in range(1, steps + 1):
        writer.write(_row(step, steps, rng, rate))
    writer.close()
    config = {
        "model": {"path": "Qwen/Qwen3-30B-A3B", "dtype": "bfloat16"},
        "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28 if rate >= 1 else 0.2, "optim": {"lr": 1e-6 * rate}},
        "rollout": {"n": 16},
        "trainer": {"experiment_name": name, "total_training_steps": steps + 30},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps}))
    _write_rollouts(run_dir, [1, steps // 2, steps], rng)
    return run_dir


def _row(step: int, steps: int, rng: np.random.Generator, rate: float) -> dict[str, float]:
    t, noise = step / steps * rate, rng.normal(size=12)
    acc = 0.12 + 0.5 * (1 - math.exp(-2.2 * t)) + 0.02 * noise[0]
    length = 900 + 2600 * t + 90 * noise[1]
    kept = int(np.clip(400 + 160 * (1 - t) + 20 * noise[2], 0, 640))
    all_right = int((768 - kept) * min(0.2 + t * 0.6, 0.9))
    seconds = {name: base * (1 + 0.7 * t * (name == "gen")) * (1 + 0.04 * noise[3]) for name, base in STAGES.items()}
    step_seconds = sum(seconds.values()) + 0.8
    tokens = 512 * 16 * (length + 180)
    row = {
        "step": step,
        "training/global_step": step,
        "critic/score/mean": 2 * acc - 1 - 0.05 * t,
        "critic/score/max": 1.0,
        "critic/score/min": -2.0 + 0.2 * abs(noise[9]),
        "critic/advantages/mean": 0.01 * noise[4],
        "critic/advantages/max": 3.5 + 0.2 * noise[4],
        "critic/advantages/min": -3.1 + 0.2 * noise[5],
        "reward/acc/mean": acc,
        "reward/raw/mean": 2 * acc - 1,
        "reward/shaped/mean": 2 * acc - 1 - 0.05 * t,
        "group/mixed_ratio": kept / 768,
        "group/all_correct_ratio": all_right / 768,
        "group/all_wrong_ratio": (768 - kept - all_right) / 768,
        "actor/entropy": 0.62 - 0.2 * t + 0.012 * noise[6] if rate >= 1 else 0.62 * math.exp(-2.5 * step / steps),
        "actor/ppo_kl": 2e-4 * (1 + 0.3 * noise[7]),
        "actor/pg_clipfrac": 0.012 * (1 + 0.15 * noise[8]),
        "actor/pg_clipfrac_lower": 2e-4 * abs(noise[8]),
        "actor/grad_norm": 0.16 * (1 + 0.12 * noise[9]) + (0.6 if step == steps // 3 else 0),
        "actor/pg_loss": 0.01 * noise[10],
        "actor/lr": 1e-6 * rate * min(1, step / 10),
        "response_length/mean": length,
        "response_length/max": 20480,
        "response_length/min": 120 + 30 * noise[11],
        "response_length/clip_ratio": 0.02 + 0.06 * t + 0.004 * noise[1],
        "response/aborted_ratio": 0.0,
        "prompt_length/mean": 180 + noise[0],
        "prompt_length/max": 700.0,
        "prompt_length/min": 31.0,
        "global_seqlen/balanced_max": tokens / 128 * 1.003,
        "global_seqlen/balanced_min": tokens / 128 * 0.998,
        "global_seqlen/max": tokens / 128 * 1.21,
        "training/filter_groups/generated": 768,
        "training/filter_groups/kept": kept,
        "training/filter_groups/dropped": 768 - kept,
        "training/filter_groups/dropped_value/0": 768 - kept - all_right,
        "training/filter_groups/dropped_value/1": all_right,
        "training/filter_groups/failed": 0,
        "training/filter_groups/discarded_surplus": max(0, kept - 512),
        "train/num_gen_batches": 1 + (kept < 470),
        "training/rollout_logprob_diff_max": 0.08 * math.exp(0.2 * noise[2]),
        "training/rollout_logprob_diff_mean": 2.1e-3 * math.exp(0.1 * noise[3]),
        "training/rollout_probs_diff_max": 0.05 * math.exp(0.2 * noise[2]),
        "training/rollout_probs_diff_mean": 8e-4 * math.exp(0.1 * noise[3]),
        "training/off_policy/trajectory_staleness/mean": 0.7 + 0.1 * noise[4],
        "training/off_policy/trajectory_staleness_worst/mean": 1.2 + 0.1 * noise[5],
        "training/off_policy/trajectory_staleness_worst/max": 3,
        "perf/throughput": tokens / step_seconds / 128,
        "perf/time_per_step": step_seconds,
        "perf/total_num_tokens": tokens,
        "perf/mfu/update_actor": 0.34 + 0.01 * noise[6],
        "perf/mfu/old_log_prob": 0.41 + 0.01 * noise[7],
        "perf/max_memory_allocated_gb": 61.2,
        "perf/max_memory_reserved_gb": 70.4,
        "push/seconds": 1.1 + 0.05 * noise[8],
        "push/bytes": 61e9,
        "push/ratio_to_bound": 1.02,
        "response_length/p10": 0.3 * length,
        "response_length/p90": 2.1 * length,
        "response_length/p99": 4.5 * length,
        "push/failed": 0,
        "timing_s/step": step_seconds,
        **{f"timing_s/{name}": value for name, value in seconds.items()},
    }
    if step % 10 == 0:
        row["val-core/aime-2024/acc/mean@32"] = 0.08 + 0.4 * (1 - math.exp(-2 * t)) + 0.01 * noise[9]
        row["val-core/aime-2024/acc/maj@32/mean"] = 0.11 + 0.47 * (1 - math.exp(-2 * t)) + 0.01 * noise[10]
        row["rollout/moe/max_vio/max"] = 4.0 + 2 * t
        row["rollout/moe/max_vio/avg"] = 2.1 + t
        row["rollout/moe/gpu_load/max_over_mean"] = 1.7 + 0.6 * t
        row["rollout/moe/node_load/max_over_mean"] = 1.15 + 0.1 * t
    return row


def write_experts(run_dir: Path, steps: tuple[int, ...] = (10, 60, 120), tokens: int = 1500, seed: int = 0) -> None:
    """Counts of skewed, drifting experts, and the what-if report on them."""
    rng = np.random.default_rng(seed)
    placement = megatron_placement(LAYERS, EXPERTS, world=GPUS, expert=GPUS)
    popularity = rng.dirichlet(np.full(EXPERTS, 1.8), size=LAYERS)
    log = MoELog(run_dir)
    for step in steps:
        popularity = popularity * rng.lognormal(0, 0.25, popularity.shape)
        popularity /= popularity.sum(-1, keepdims=True)
        acc = MoELoadAccumulator(LAYERS, EXPERTS)
        ids = np.stack([rng.choice(EXPERTS, size=(tokens, 8), p=p) for p in popularity], axis=1)
        acc.update_rows(ids)
        log.write(step, "rollout", acc, placement)
    log.close()
    moe_report(run_dir)


def _write_rollouts(run_dir: Path, steps: list[int], rng: np.random.Generator) -> None:
    (run_dir / "rollouts").mkdir(exist_ok=True)
    for step in steps:
        writer = JsonlWriter(run_dir / "rollouts" / f"{step}.jsonl")
        for prompt in range(6):
            a, b = (int(x) for x in rng.integers(10, 99, 2))
            for sample in range(4):
                acc = float(rng.random() < 0.3 + 0.5 * step / steps[-1])
                answer = a + b if acc else a + b + int(rng.integers(1, 9))
                length = int(rng.integers(40, 400))
                penalty = -0.3 if length > 350 else 0.0
                writer.write(
                    {
                        "step": step,
                        "uid": f"0-{prompt}-0",
                        "sample": sample,
                        "data_source": "aime-2024",
                        "prompt": f"Let x = {a} and y = {b}. Find the value of x + y. <b>Think</b> step by step.",
                        "response": f"We add the two numbers: {a} + {b} = {answer}.\n</script>\nAnswer: {answer}",
                        "ground_truth": str(a + b),
                        "length": length,
                        "finish_reason": "length" if length > 390 else "stop",
                        "reward": 2 * acc - 1 + penalty,
                        "raw": 2 * acc - 1,
                        "acc": acc,
                        "status": "ok",
                    }
                )
        writer.close()


if __name__ == "__main__":
    import sys

    root = Path(sys.argv[1])
    write_experts(write_example(root / "dapo-moe"))
    write_example(root / "no-clip-higher", "no-clip-higher", seed=1, rate=0.6)
