"""Cost of knowing: the expert-load accumulator per assignment, and all metrics of a step against the step's time.

What a step of the demo pays on all of its ranks and its driver is added up: every family, per micro-batch where it is
computed so, what the training routers record, the counting of what was sampled, and writing. What the rollout engine
itself does to tell its routing is part of generation and not here.

Run: python benchmarks/metrics.py [--step-seconds S]. Prints the figures and writes benchmarks/results/metrics.json.
Times are CPU time of one core (the best of several passes), so that other work on the machine does not count; writing
to disk is wall time. The step time is the demo's, read from runs/demo/metrics.jsonl where it has been run.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict

from megatron_dapo import metrics as m
from megatron_dapo.algorithms import RolloutCorrectionConfig, correct_rollout
from megatron_dapo.engine.routing import expert_counts
from megatron_dapo.models.architecture import Architecture, Mixture, Rope
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.rollout.requests import Generation
from megatron_dapo.trainers.expert_load import Counts, ExpertLoad, RankLoad

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "metrics.json"
DEMO = ROOT.parent / "runs" / "demo" / m.METRICS_FILE
TOKENS, LAYERS, TOPK, EXPERTS = 32768, 48, 8, 128  # the size that the accumulator is held to
DIMS = m.ModelDims(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, head=260,
    experts=8, topk=2, expert_ffn=128, moe_layers=4,
)  # fmt: skip
ARCH = Architecture(
    "qwen3_moe", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=260, tied=False, norm_eps=1e-6,
    max_positions=64, rope=Rope(1e4), mixture=Mixture(experts=8, topk=2, ffn=128, layers=(0, 1, 2, 3)),
)  # fmt: skip
RANKS, MICRO_BATCHES = 2, 1  # of the demo, whose micro-batches hold all rows of a rank


def best_seconds(
    action: Callable[[], object], passes: int = 7, clock: Callable[[], float] = time.process_time
) -> float:
    """Seconds of the best pass, after one to warm up."""
    action()
    best = float("inf")
    for _ in range(passes):
        began = clock()
        action()
        best = min(best, clock() - began)
    return best


def accumulator() -> dict[str, float]:
    """Nanoseconds per assignment by id type, against a plain bincount, and the scratch memory."""
    rows = 32
    mask = torch.ones(rows, TOKENS // rows + 1, dtype=torch.bool)  # +1: a row's last token has no routing
    assignments = TOKENS * LAYERS * TOPK
    figures: dict[str, float] = {}
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        routed = torch.randint(0, EXPERTS, (rows, TOKENS // rows + 1, LAYERS, TOPK), dtype=dtype)
        counter = m.MoELoadAccumulator(LAYERS, EXPERTS)
        name = str(dtype).removeprefix("torch.")
        figures[f"ns_per_assignment_{name}"] = best_seconds(lambda: counter.update(routed, mask)) / assignments * 1e9  # noqa: B023
    ids = torch.randint(0, EXPERTS, (TOKENS, LAYERS, TOPK), dtype=torch.uint8)
    offsets = (torch.arange(LAYERS) * EXPERTS)[:, None]

    def plain() -> torch.Tensor:
        return torch.bincount((ids.long() + offsets).flatten(), minlength=LAYERS * EXPERTS)

    figures["ns_per_assignment_one_plain_bincount"] = best_seconds(plain) / assignments * 1e9
    counter = m.MoELoadAccumulator(LAYERS, EXPERTS)
    counter.update_rows(ids[:2048])
    figures["peak_growth_mb"] = peak_growth_mb(lambda: counter.update_rows(ids))
    figures["peak_growth_mb_one_plain_bincount"] = peak_growth_mb(plain)
    return figures


def peak_growth_mb(action: Callable[[], object]) -> float:
    """How far the process's peak memory rises above what it holds now (Linux keeps the peak, and can reset it)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmHWM")
    action()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def simulated_ranks(ranks: int = 128) -> dict[str, float]:
    """Merging 16 × 8 ranks and reporting on them: the merged count equals the single one."""
    ids = torch.randint(0, EXPERTS, (ranks * 64, LAYERS, TOPK), dtype=torch.uint8)
    parts = []
    for part in ids.chunk(ranks):
        parts.append(m.MoELoadAccumulator(LAYERS, EXPERTS))
        parts[-1].update_rows(part)
    single, merged = m.MoELoadAccumulator(LAYERS, EXPERTS), m.MoELoadAccumulator(LAYERS, EXPERTS)
    single.update_rows(ids)

    def merge_all() -> None:
        merged.reset()
        for part in parts:
            merged.merge(part)

    merging = best_seconds(merge_all)
    assert torch.equal(single.counts, merged.counts)
    placement = m.megatron_placement(LAYERS, EXPERTS, world=ranks, expert=ranks)
    counts = merged.counts.numpy()
    return {
        "merge_128_ranks_ms": merging * 1e3,
        "report_ms": best_seconds(merged.compute) * 1e3,
        "placement_report_ms": best_seconds(lambda: m.placement_metrics(counts, placement)) * 1e3,
        "what_if_128_gpus_s": best_seconds(lambda: m.what_if(counts, ranks), passes=1),
    }


def demo_batch(rows: int = 128, prompt: int = 16, width: int = 16) -> TensorDict:
    lengths = torch.randint(2, width + 1, (rows,))
    mask = torch.arange(width) < lengths[:, None]
    fields = {
        name: torch.randn(rows, width)
        for name in ("token_level_scores", "token_level_rewards", "advantages", "returns")
    }
    return TensorDict(
        fields
        | {
            "response_mask": mask,
            "response_length": lengths,
            "prompt_length": torch.full((rows,), prompt),
            "finish_length": lengths == width,
            "old_log_probs": -torch.rand(rows, width),
            "rollout_log_probs": -torch.rand(rows, width),
            "sum_pi_squared": torch.rand(rows, width),
        },
        batch_size=[rows],
    )


class Experts:
    """Expert load of the demo from the routers to the report: both ranks' counters, and the driver's."""

    size = RANKS

    def __init__(self, batch: TensorDict, directory: Path) -> None:
        self.loads = [RankLoad(ARCH, keep_routing=False) for _ in range(RANKS)]
        self.driver = ExpertLoad(ARCH, Topology(world=RANKS, expert=RANKS), directory, every=10)
        self.generations = [
            Generation("r", (0,) * n, (0.0,) * n, "stop", None, (0,) * n, np.random.default_rng(n).integers(
                0, 8, (16 + n - 1, 4, 2), dtype=np.uint8
            ))
            for n in batch["response_length"].tolist()
        ]  # fmt: skip
        tokens = len(self.generations) * 32 // (RANKS * MICRO_BATCHES)
        self.choice = {layer: torch.randint(0, 8, (tokens, 2)) for layer in range(4)}
        self.micro_batch = SimpleNamespace(real=torch.ones(tokens, dtype=torch.bool))

    def call(self, method: str) -> list[Counts]:
        return [load.take() for load in self.loads]

    def step(self, step: int) -> m.Metrics:
        for load in self.loads:
            recorded = [{layer: ids.to(torch.int16) for layer, ids in self.choice.items()}] * MICRO_BATCHES
            load.trained(expert_counts(recorded, [self.micro_batch] * MICRO_BATCHES, 4, 8))
        self.loads[0].sampled(self.generations)
        return self.driver.step(self, step, last=False)


def micro_batch_metrics(part: TensorDict, correction: RolloutCorrectionConfig) -> m.Metrics:
    """What the loss of one micro-batch tells."""
    mask, old, rollout = part["response_mask"], part["old_log_probs"], part["rollout_log_probs"]
    return {
        **{f"actor/{name}": m.masked_mean(old, mask) for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")},
        **{f"actor/{name}": m.Sum(float(old.sum())) for name in ("pg_loss", "loss")},
        **m.agreement_metrics(old, rollout, mask),
        **m.measured(correct_rollout(correction, old, rollout, mask).metrics),
    }


def all_metrics(batch: TensorDict, experts: Experts) -> dict[str, float]:
    """Every family that a step of the demo may report, merged over its ranks and their micro-batches."""
    rows = batch.batch_size[0]
    mask, lengths = batch["response_mask"], (batch["response_length"] + batch["prompt_length"]).tolist()
    old, advantages = batch["old_log_probs"], batch["advantages"]
    accuracy, groups = [float(i % 3 == 0) for i in range(rows)], [i // 8 for i in range(rows)]
    seconds = dict.fromkeys(("step", "gen", "reward", "old_log_prob", "adv", "update_actor"), 0.1)
    correction = RolloutCorrectionConfig(bypass_mode=True)
    parts = [
        m.reduce(m.settle(micro_batch_metrics(part, correction)) for part in batch.chunk(RANKS * MICRO_BATCHES)),
        m.data_metrics(batch, max_prompt_length=24),
        m.sequence_balance_metrics(lengths, [list(range(0, rows, 2)), list(range(1, rows, 2))]),
        m.timing_metrics(seconds, 1000, 3000),
        m.throughput_metrics(3000, 1.0, RANKS),
        *[m.memory_metrics() for _ in range(1 + RANKS)],
        m.efficiency_metrics("update_actor", DIMS, lengths, 0.5, RANKS, training=True, peak_tflops=1.0),
        m.variance_proxy_metrics(batch["sum_pi_squared"], old, advantages, mask, gradient_norm=0.1),
        m.staleness_metrics([[3, 4]] * rows, 4),
        m.spec_decode_metrics([4] * rows, [3] * rows, [2] * rows),
        m.group_metrics(accuracy, groups),
        m.reward_metrics(accuracy, accuracy, accuracy),
        m.source_metrics(["math", "code"] * (rows // 2), accuracy),
        m.verifier_metrics({"scored": rows, "pooled": rows}, [0.01] * rows),
        m.push_metrics(0.01, 8_000_000, received=8_000_000, stored=8_000_000),
        experts.step(2),
    ]
    return m.compute(m.reduce(parts))


def overhead(step_seconds: float) -> dict[str, float]:
    """Milliseconds per step of computing and writing everything, and its share of the step."""
    batch = demo_batch()
    with tempfile.TemporaryDirectory() as directory:
        experts = Experts(batch, Path(directory))
        metrics = all_metrics(batch, experts)
        computing = best_seconds(lambda: all_metrics(batch, experts), passes=30)
        experts_alone = best_seconds(lambda: experts.step(2), passes=30)
        report = best_seconds(lambda: experts.step(10), passes=10, clock=time.perf_counter) - experts_alone
        trackers = m.Trackers(["tensorboard"], directory, {})
        writing = best_seconds(lambda: trackers.log(1, metrics), passes=30, clock=time.perf_counter)
        trackers.close()
        experts.driver.close()
    return {
        "metrics_per_step": len(metrics),
        "compute_ms": computing * 1e3,
        "of_it_expert_load_ms": experts_alone * 1e3,
        "moe_report_every_10_steps_ms": report * 1e3,
        "jsonl_and_tensorboard_ms": writing * 1e3,
        "step_seconds": step_seconds,
        "share_of_step": (computing + report / 10 + writing) / step_seconds,
    }


def large() -> dict[str, float]:
    """Sizes of a real run: 8192 trajectories, AIME with 32 samples, a report on a thousand steps."""
    batch = demo_batch(rows=8192, width=1024)
    aime = [f"p{i // 32}" for i in range(960)]
    accuracy = np.random.default_rng(0).integers(0, 2, 960).tolist()
    answers = [str(i % 7) for i in range(960)]
    return {
        "data_metrics_8192x1024_s": best_seconds(lambda: m.data_metrics(batch), passes=3),
        "validation_aime_32_s": best_seconds(
            lambda: m.validation_metrics(["aime"] * 960, aime, {"acc": accuracy}, answers), passes=3
        ),
    }


def demo_step_seconds() -> float | None:
    if not DEMO.exists():
        return None
    return statistics.median(row["timing_s/step"] for row in m.read_jsonl(DEMO) if "timing_s/step" in row)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--step-seconds", type=float, default=None, help="step time to compare with (default: the demo's, or 1 s)"
    )
    step_seconds = parser.parse_args().step_seconds or demo_step_seconds() or 1.0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {
        "accumulator_32k_tokens_48_layers_top8": accumulator(),
        "simulated_16x8_ranks": simulated_ranks(),
        "overhead_of_all_metrics_demo": overhead(step_seconds),
        "large": large(),
    }
    rounded = {part: {k: float(f"{v:.4g}") for k, v in values.items()} for part, values in figures.items()}
    for part, values in rounded.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:<40} {value:g}")
    RESULTS.write_text(json.dumps(rounded, indent=2) + "\n")


if __name__ == "__main__":
    main()
