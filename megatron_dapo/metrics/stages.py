"""What the stages around the model report: groups and their signal, rewards and verifiers, the weight push."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch

from megatron_dapo.metrics.typed import Max, Mean, Metrics, Min, Sum, stats


def group_metrics(accuracies: Sequence[float], group_ids: Sequence[Hashable]) -> Metrics:
    """Of the groups as generated, before any filter: `group/{all_correct,all_wrong,mixed}_ratio`, `group/acc_std`.

    Only mixed groups carry a gradient; the ratios say whether the data is too easy or too hard for the policy.
    """
    groups: dict[Hashable, list[float]] = {}
    for group, accuracy in zip(group_ids, accuracies, strict=True):
        groups.setdefault(group, []).append(float(accuracy))
    n = len(groups)
    correct = sum(min(values) >= 1 for values in groups.values())
    wrong = sum(max(values) <= 0 for values in groups.values())
    spread = sum(float(torch.tensor(values).std(correction=0)) for values in groups.values())
    return {
        "group/all_correct_ratio": Mean(correct, n),
        "group/all_wrong_ratio": Mean(wrong, n),
        "group/mixed_ratio": Mean(n - correct - wrong, n),
        "group/acc_std": Mean(spread, n),
    }


def reward_metrics(
    rewards: Sequence[float], raw: Sequence[float], accuracies: Sequence[float], failed: Sequence[bool]
) -> Metrics:
    """Rewards per trajectory after and before shaping, and accuracy: `reward/*`. Failed ones count only as failed.

    `reward/shaping/mean` is what the length penalty (and any other shaping) took away on average.
    """
    ok = ~torch.tensor(failed, dtype=torch.bool)
    shaped, plain, right = (torch.tensor(x, dtype=torch.float64) for x in (rewards, raw, accuracies))
    return (
        stats("reward/shaped", shaped, ok)
        | stats("reward/raw", plain, ok)
        | {
            "reward/acc/mean": Mean(right[ok].sum(), ok.sum()),
            "reward/shaping/mean": Mean((shaped - plain)[ok].sum(), ok.sum()),
            "reward/failed_ratio": Mean((~ok).sum(), len(failed)),
        }
    )


def verifier_metrics(counts: Mapping[str, int], seconds: Sequence[float] = ()) -> Metrics:
    """Health of the verifiers: `verifier/count/{event}` (timeouts, retries, crashes, …) and `verifier/seconds/*`.

    `counts` are the events of this step (not since the start), `seconds` the time each call took.
    """
    metrics: Metrics = {f"verifier/count/{event}": Sum(n) for event, n in counts.items()}
    return metrics | stats("verifier/seconds", torch.tensor(seconds, dtype=torch.float64))


def source_metrics(sources: Sequence[str], accuracies: Sequence[float]) -> Metrics:
    """Accuracy and number of trajectories by data source: `source/{name}/acc`, `source/{name}/trajectories`."""
    total: Counter[str] = Counter()
    right: dict[str, float] = {}
    for source, accuracy in zip(sources, accuracies, strict=True):
        total[source] += 1
        right[source] = right.get(source, 0.0) + float(accuracy)
    metrics: Metrics = {f"source/{source}/acc": Mean(right[source], n) for source, n in total.items()}
    return metrics | {f"source/{source}/trajectories": Sum(n) for source, n in total.items()}


def push_metrics(
    seconds: float,
    num_bytes: int,
    *,
    received: int | None = None,
    stored: int = 1,
    bound_seconds: float | None = None,
    checksum_ok: bool | None = None,
) -> Metrics:
    """The push of weights into the rollout engines: `push/*`.

    `num_bytes` are the bytes that moved, `received` those that the engines' ranks counted, `stored` the weights that
    these keep, and so the fewest bytes possible. `bound_seconds` is what the bytes cost at the transport's speed (a
    plain copy of as many): `push/ratio_to_bound` is 1 when nothing but the copy costs time. `push/checksum_ok` is 1
    when what the engines hold is what the trainer sent, and the smallest of all pushes counts.
    """
    metrics: Metrics = {
        "push/seconds": Sum(seconds),
        "push/seconds_max": Max(seconds),
        "push/bytes": Sum(num_bytes),
        "push/gigabytes_per_s": Mean(num_bytes / 1e9, seconds),
    }
    if received is not None:
        metrics["push/bytes_received"] = Sum(received)
        metrics["push/received_over_stored"] = Mean(received, stored)
    if bound_seconds is not None:
        metrics["push/ratio_to_bound"] = Mean(seconds, bound_seconds)
    if checksum_ok is not None:
        metrics["push/checksum_ok"] = Min(float(checksum_ok))
    return metrics
