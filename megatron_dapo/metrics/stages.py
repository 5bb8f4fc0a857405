"""What the stages around the model report: groups and their signal, rewards and verifiers, the weight push."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch

from megatron_dapo.metrics.typed import Max, Mean, Metrics, Sum, stats


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


def reward_metrics(rewards: Sequence[float], raw: Sequence[float], accuracies: Sequence[float]) -> Metrics:
    """Rewards per trajectory after and before shaping, and accuracy: `reward/*`.

    `reward/shaping/mean` is what the length penalty (and any other shaping) took away on average.
    """
    shaped, plain = (torch.tensor(x, dtype=torch.float64) for x in (rewards, raw))
    return (
        stats("reward/shaped", shaped)
        | stats("reward/raw", plain)
        | {
            "reward/acc/mean": Mean(sum(accuracies), len(accuracies)),
            "reward/shaping/mean": Mean((shaped - plain).sum(), len(rewards)),
        }
    )


def verifier_metrics(counts: Mapping[str, int], seconds: Sequence[float] = ()) -> Metrics:
    """Health of the verifiers: `verifier/count/{event}` (timeouts, retries, crashes, …), `verifier/seconds/*`, and
    `reward/failed_ratio`, of `counts["failed"]` among `counts["scored"]` responses.

    `counts` are the events of this step (not since the start), `seconds` the time each job of a worker took.
    """
    metrics: Metrics = {f"verifier/count/{event}": Sum(n) for event, n in counts.items()}
    metrics["reward/failed_ratio"] = Mean(counts.get("failed", 0), counts.get("scored", 0))
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


def push_metrics(seconds: float, num_bytes: int, *, received: int, stored: int) -> Metrics:
    """The push of weights into the rollout engines: `push/*`.

    `num_bytes` are the bytes that moved, `received` those that the engines' ranks counted, `stored` the weights that
    these keep, and so the fewest bytes possible: `push/ratio_to_bound` is 1 when no byte was received in vain.
    """
    return {
        "push/seconds": Sum(seconds),
        "push/seconds_max": Max(seconds),
        "push/bytes": Sum(num_bytes),
        "push/bytes_received": Sum(received),
        "push/gigabytes_per_s": Mean(num_bytes / 1e9, seconds),
        "push/ratio_to_bound": Mean(received, stored),
    }
