"""Validation numbers that can be compared: mean@k, best@k, worst@k, maj@k per data source, the same in every run."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from megatron_dapo.metrics.typed import Mean, Metrics, Sum

DRAWS = 1000  # bootstrap draws of the majority vote, which has no closed form
SEED = 42


def validation_metrics(
    sources: Sequence[str],
    prompts: Sequence[Hashable],
    variables: Mapping[str, Sequence[float]],
    predictions: Sequence[str | None] | None = None,
    *,
    scored: Sequence[bool] | None = None,
    seed: int = SEED,
) -> Metrics:
    """Metrics of a validation pass over samples, `val-core/{source}/{variable}/{metric}` and `val-aux/…`.

    All sequences have one entry per sample: the data source, the prompt it belongs to, the values (`acc`, `reward`, …),
    the extracted answer where there is one, and whether the sample could be scored (None: all could). Averaged over a
    source's prompts: `mean@N`, `std@N` (population) and for n = 2, 4, 8, … and N: `best@n/{mean,std}`,
    `worst@n/{mean,std}` (expectation and spread of the best of n draws with replacement, exact) and with predictions
    `maj@n/{mean,std}` (majority vote of n draws, ties to the first seen, 1000 draws from an own generator). Core are
    mean, best and maj at N of the core variable: `acc` where it exists, else `reward`.

    N is the number of samples that every prompt of the source has (the fewest, where they differ), scored or not: a
    verifier that fails once must not rename a number. `val-aux/{source}/unscored` counts what could not be scored; the
    prompt's numbers come from its other samples, and a prompt without any is left out.
    """
    rows: dict[tuple[str, Hashable], list[int]] = {}
    for i, key in enumerate(zip(sources, prompts, strict=True)):
        rows.setdefault(key, []).append(i)
    core = "acc" if "acc" in variables else "reward"
    asked = {source: min(len(r) for (s, _), r in rows.items() if s == source) for source in dict.fromkeys(sources)}
    unscored = dict.fromkeys(asked, 0)
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    for (source, _), asked_for in rows.items():
        indices = [i for i in asked_for if scored is None or scored[i]]
        unscored[source] += len(asked_for) - len(indices)
        if not indices:
            continue
        votes = None if predictions is None else [predictions[i] for i in indices]
        for variable, values in variables.items():
            x = np.asarray([values[i] for i in indices], dtype=np.float64)
            for metric, value in _of_prompt(x, votes, asked[source], rng).items():
                section = _section(metric, variable == core, asked[source])
                found.setdefault(f"{section}/{source}/{variable}/{metric}", []).append(value)
    means: Metrics = {name: Mean(sum(values), len(values)) for name, values in found.items()}
    return means | {f"val-aux/{source}/unscored": Sum(count) for source, count in unscored.items()}


def best_of(values: Float[np.ndarray, " n"], draws: int, *, largest: bool = True) -> tuple[float, float]:
    """Mean and standard deviation of the best (or worst) of `draws` draws with replacement, exactly.

    With sorted values x_1 ≤ … ≤ x_N, P(max = x_i) = (i/N)^draws - ((i-1)/N)^draws.
    """
    if len(values) == 0:
        raise ValueError("best_of needs at least one value")
    ordered = np.sort(values * (1.0 if largest else -1.0))
    weight = np.diff((np.arange(len(values) + 1) / len(values)) ** draws)
    mean = float(weight @ ordered)
    variance = float(weight @ (ordered - mean) ** 2)
    return (mean if largest else -mean), variance**0.5


def majority_of(
    values: Float[np.ndarray, " n"], votes: Sequence[str | None], draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Mean and standard deviation of the majority answer's value over bootstrap samples of `draws` answers."""
    codes = np.unique(np.asarray([str(v) for v in votes]), return_inverse=True)[1]
    picks = rng.integers(0, len(values), size=(DRAWS, draws))
    drawn = codes[picks]
    same = np.stack([(drawn == drawn[:, i : i + 1]).sum(-1) for i in range(draws)], axis=-1)
    winner = picks[np.arange(DRAWS), same.argmax(-1)]  # argmax takes the first position: ties go to the first seen
    chosen = values[winner]
    return float(chosen.mean()), float(chosen.std())


def _of_prompt(
    values: Float[np.ndarray, " scored"], votes: Sequence[str | None] | None, n: int, rng: np.random.Generator
) -> dict[str, float]:
    """One prompt's metrics under the names of `n` samples; as all draws are with replacement, fewer values do."""
    metrics = {f"mean@{n}": float(values.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(values.std())
    for k in [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]:
        metrics[f"best@{k}/mean"], metrics[f"best@{k}/std"] = best_of(values, k)
        metrics[f"worst@{k}/mean"], metrics[f"worst@{k}/std"] = best_of(values, k, largest=False)
        if votes is not None:
            metrics[f"maj@{k}/mean"], metrics[f"maj@{k}/std"] = majority_of(values, votes, k, rng)
    return metrics


def _section(metric: str, is_core: bool, n: int) -> str:
    kind, _, rest = metric.partition("@")
    at = int(rest.partition("/")[0])
    return "val-core" if is_core and kind in ("mean", "best", "maj") and at == n else "val-aux"
