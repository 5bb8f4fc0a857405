"""What an evaluation may claim: avg@n, unbiased pass@k and maj@k over a set of problems, each with its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

SEED = 42
RESAMPLES = 2000  # bootstrap draws of the set of problems
SUBSETS = 256  # subsets drawn of a problem's samples for maj@k, k < n
BLOCK = 1 << 20  # cells of the bootstrap held at once
COVERAGE = 0.95


@dataclass(frozen=True)
class Samples:
    """One problem's judged answers: whether each is right (0…1), and what it said where a verifier could read that."""

    right: tuple[float, ...]
    said: tuple[str | None, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def estimates(problems: Sequence[Samples], n: int, *, seed: int = SEED) -> dict[str, Estimate]:
    """`avg@n`, `pass@k` and `maj@k` for k = 1, 2, 4, … and n, the samples that every problem was to have.

    A problem with fewer than k, as some could not be judged, answers pass@k and maj@k with those it has: that is a
    little low at most, where leaving the problem out would change what the number is about.

    The interval is the percentile bootstrap over problems: what another set of problems of this kind, answered afresh,
    would give. Problems without samples must be left out. The generator is its own, so results repeat. No problems, no
    estimates.
    """
    if not problems:
        return {}
    rng = np.random.default_rng(seed)
    columns = [_of_problem(problem, n, rng) for problem in problems]
    values = np.array([list(column.values()) for column in columns])
    low, high = bootstrap_interval(values, rng)
    means = values.mean(0)
    return {name: Estimate(*map(float, row)) for name, *row in zip(columns[0], means, low, high, strict=True)}


def pass_at(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (Codex), section 2.1; the product form does not overflow.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {n} samples with {correct} right: needs 1 <= k <= n and 0 <= right <= n")
    if n - correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def majority_at(samples: Samples, k: int, rng: np.random.Generator) -> float:
    """Expected accuracy of the most frequent answer among k samples drawn without replacement.

    Samples without an answer do not vote; tied answers share; where nobody votes the majority is wrong. Exact for
    k = n, else the mean over SUBSETS drawn subsets.
    """
    names = sorted({said for said in samples.said if said is not None})
    if not names:
        return 0.0
    votes, worth = np.zeros((len(samples.right), len(names))), np.zeros(len(names))
    for row, (right, said) in enumerate(zip(samples.right, samples.said, strict=True)):
        if said is not None:
            votes[row, names.index(said)] = 1.0
            worth[names.index(said)] += right
    return _majority(votes, worth / votes.sum(0), k, rng)


def bootstrap_interval(
    values: Float[np.ndarray, "problems m"], rng: np.random.Generator
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Ends of the COVERAGE interval of each column's mean over resampled rows; all columns see the same resamples."""
    count = len(values)
    block = max(1, BLOCK // count)
    means = []
    for start in range(0, RESAMPLES, block):
        draws = min(block, RESAMPLES - start)
        weights: Int[np.ndarray, "draws problems"] = rng.multinomial(count, np.full(count, 1 / count), size=draws)
        means.append(weights @ values / count)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0)
    return low, high


def _of_problem(problem: Samples, n: int, rng: np.random.Generator) -> Mapping[str, float]:
    right = sum(value >= 1 for value in problem.right)
    total = len(problem.right)
    ks = [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
    columns = {f"avg@{n}": float(np.mean(problem.right))}
    columns |= {f"pass@{k}": pass_at(total, right, min(k, total)) for k in ks}
    if n > 1:
        columns |= {f"maj@{k}": majority_at(problem, min(k, total), rng) for k in ks if k > 1}
    return columns


def _majority(
    votes: Float[np.ndarray, "n answers"], worth: Float[np.ndarray, " answers"], k: int, rng: np.random.Generator
) -> float:
    n = len(votes)
    if k == n:
        counts = votes.sum(0, keepdims=True)
    else:
        chosen = rng.permuted(np.tile(np.arange(n), (SUBSETS, 1)), axis=1)[:, :k]
        counts = votes[chosen].sum(1)
    most = counts.max(-1, keepdims=True)
    winners = (counts == most) & (most > 0)
    shares = winners.sum(-1)
    return float(np.divide(winners @ worth, shares, out=np.zeros(len(counts)), where=shares > 0).mean())
