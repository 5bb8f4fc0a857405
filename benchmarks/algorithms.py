"""What the algorithms cost: GRPO advantage, the DAPO loss with its aggregation, balancing and packing.

Run: python benchmarks/algorithms.py [--repeats 30] [--check]. Prints each figure with its budget and its ratio to the
committed baseline, and writes benchmarks/results/algorithms.json; --check fails beyond a budget and writes nothing.

Everything runs in one thread on the CPU. Times are CPU time of that thread, the best of the repeats: what an idle
machine would take, also on a busy one. A figure named "fresh" pays for new memory from the kernel each time; the others
reuse memory, as a process does that runs for days.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.algorithms import PolicyLossConfig, advantage, aggregate_loss, policy_loss
from megatron_dapo.data.packing import balance, pack, workload

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
BUDGETS = {
    "grpo_8192x1024_ms": 10.0,
    "loss_512x4096_to_bare_ratio": 1.3,
    "balance_8192_over_128_ms": 10.0,
    "balance_max_to_mean_ratio": 1.0005,
    "balance_count_difference": 1.0,
    "pack_8192_ms": 100.0,
    "pack_bins_to_bound_ratio": 1.001,
}


def best(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Least milliseconds of each function; they take turns, so that all meet the same machine."""
    least = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = time.thread_time()
            function()
            least[i] = min(least[i], 1e3 * (time.thread_time() - start))
    return least


def keep_memory() -> None:
    """Tell glibc to keep what is freed: it returns blocks of 32 MiB, and gets them again at 8192 page faults each."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        if libc.mallopt(parameter, value) != 1:
            raise OSError(f"mallopt({parameter}, {value}) failed")


def grpo(repeats: int) -> dict[str, float]:
    """8192 responses of up to 1024 tokens in groups of 16; beside it the two passes over memory that none can avoid."""
    lengths = torch.randint(1, 1025, (8192,))
    mask = torch.arange(1024) < lengths[:, None]
    rewards = torch.zeros(8192, 1024)
    rewards[torch.arange(8192), lengths - 1] = torch.randint(0, 2, (8192,)).float()
    ids = [f"0-{i // 16}-0" for i in range(8192)]

    def passes() -> Tensor:
        return torch.where(mask, rewards.sum(-1, keepdim=True), 0.0)

    def ours() -> object:
        return advantage("grpo")(rewards, mask, ids)

    (fresh,) = best(ours, repeats=repeats)
    keep_memory()
    mine, bare = best(ours, passes, repeats=repeats)
    return {"grpo_8192x1024_ms": mine, "grpo_8192x1024_fresh_ms": fresh, "grpo_to_two_passes_ratio": mine / bare}


def bare_loss(logprob: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """The clipped objective as one writes it down, without metrics or protection against what padding may hold."""
    ratio = (logprob - old).clamp(-20, 20).exp()
    worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    loss = torch.where(advantages < 0, torch.minimum(worst, -advantages * 10.0), worst)
    return (loss * mask).sum() / tokens


def loss(repeats: int) -> dict[str, float]:
    """Forward and backward of policy loss and aggregation on one large micro-batch."""
    shape = (512, 4096)
    old = -torch.rand(shape)
    logprob = (old + 0.1 * torch.randn(shape)).requires_grad_()
    advantages = torch.randn(512, 1).expand(shape).contiguous()
    mask = torch.arange(4096) < torch.randint(1, 4097, (512, 1))
    tokens = mask.sum()
    config = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0)

    def ours() -> None:
        logprob.grad = None
        per_token, _ = policy_loss("vanilla")(logprob, old, advantages, mask, config)
        aggregate_loss(per_token, mask, "token-mean", global_tokens=tokens).backward()

    def bare() -> None:
        logprob.grad = None
        bare_loss(logprob, old, advantages, mask, tokens).backward()

    mine, plain = best(ours, bare, repeats=repeats)
    return {"loss_512x4096_ms": mine, "loss_bare_expression_ms": plain, "loss_512x4096_to_bare_ratio": mine / plain}


def packing(repeats: int) -> dict[str, float]:
    """8192 lognormal lengths (median 665, up to 20480) over 128 ranks, and into bins of 32768 tokens."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 8192).clip(16, 20480).astype(int)
    costs = workload(lengths)
    lists = balance(costs, 128)
    loads = np.array([costs[rows].sum() for rows in lists])
    counts = [len(rows) for rows in lists]
    tokens = np.array([lengths[rows].sum() for rows in lists])
    worst = 0.0
    for max_tokens in (20480, 32768, 65536):
        worst = max(worst, len(pack(lengths, max_tokens)) / -(-int(lengths.sum()) // max_tokens))
    spent = best(
        lambda: balance(costs, 128), lambda: pack(lengths, 32768), lambda: pack(lengths, 20480), repeats=repeats
    )
    return {
        "balance_8192_over_128_ms": spent[0],
        "balance_max_to_mean_ratio": float(loads.max() / loads.mean()),
        "balance_count_difference": float(max(counts) - min(counts)),
        "balance_max_to_mean_tokens_ratio": float(tokens.max() / tokens.mean()),
        "pack_8192_ms": max(spent[1:]),
        "pack_bins_to_bound_ratio": worst,
    }


def main() -> None:
    """Measure, compare, print; write the baseline or check the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="fail beyond a budget, leave the baseline alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures = grpo(options.repeats) | loss(options.repeats) | packing(options.repeats)
    baseline = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    beyond = []
    for name, value in figures.items():
        budget = BUDGETS.get(name)
        against = f"{value / baseline[name]:8.2f} × baseline" if baseline.get(name) else ""
        allowed = "" if budget is None else f"  budget {budget:g}"
        print(f"{name:36}{value:12.4f}{allowed:18}{against}")
        if budget is not None and value > budget:
            beyond.append(name)
    if beyond:
        print(f"beyond budget: {', '.join(beyond)}")
    if options.check:
        sys.exit(bool(beyond))
    figures |= {"cores": os.cpu_count() or 1}
    RESULTS.write_text(json.dumps({name: round(value, 5) for name, value in figures.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
