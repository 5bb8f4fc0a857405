"""Speed of verdicts: answers that need no algebra, algebra, a user's function, and how the manager's batches do.

Run: python benchmarks/rewards.py. Prints the figures and writes benchmarks/results/rewards.json. Rates are per second
of CPU time of one core for work done in this process, per second of wall time for work done by the pool.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dapo.rewards import gsm8k, math_robust, math_strict
from megatron_dapo.rewards.custom import CustomFunction
from megatron_dapo.rewards.pool import Pool
from megatron_dapo.rewards.worker import Setup

RESULTS = Path(__file__).parent / "results" / "rewards.json"
REASONING = "Let x be the number of ways. We compute the answer step by step: $x^2 + 3x = 10$, hence \\frac{a}{b}. "
ENDINGS = ("Answer: {}", "Answer: {}.", "**Answer:** {}", "Answer: ${}$", "Therefore \\boxed{{{}}}.", "Answer: {} cm")
GSM8K_ENDINGS = ("#### {}", "#### ${}", "#### {}.0", "#### {} eggs", "Answer: {}", "She has {} left.")


def responses(count: int, length: int, endings: Sequence[str] = ENDINGS) -> list[tuple[str, str]]:
    """(response, truth): `length` characters of reasoning and an answer in one of the usual forms; half are right."""
    rng = random.Random(0)
    body = (REASONING * (length // len(REASONING) + 1))[:length]
    made = []
    for _ in range(count):
        truth = rng.randrange(1000)
        said = truth if rng.random() < 0.5 else truth + 1
        made.append((f"{body}\n{rng.choice(endings).format(said)}", str(truth)))
    return made


def rate(verify: Callable[[str, str], object], pairs: Sequence[tuple[str, str]]) -> float:
    """Verdicts per second of CPU time, the best of three passes."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for response, truth in pairs:
            verify(response, truth)
        best = min(best, time.process_time() - began)
    return len(pairs) / best


def pool_rate(pool: Pool, jobs: list[tuple[str, tuple]]) -> float:
    """Jobs per second of wall time, workers already started."""
    pool.run(jobs[:64])
    began = time.monotonic()
    outcomes = pool.run(jobs)
    assert all(outcome.status == "ok" for outcome in outcomes)
    return len(jobs) / (time.monotonic() - began)


HOSTILE = (
    "9^{9^{9}}",
    "99999^{9999}",
    "1234567!",
    "\\sum_{k=1}^{10000}\\frac{1}{k^2}",
    "x^{99}+" * 40 + "1",
    "((((x+1)^9)^9)^9)^9",
)


def slowest_hostile(pool: Pool) -> float:
    """Seconds of the slowest answer made to be slow; the pool's deadline bounds it."""
    worst = 0.0
    for answer in HOSTILE:
        began = time.monotonic()
        pool.run([("symbolic", (answer, "\\sqrt{2}+x"))])
        worst = max(worst, time.monotonic() - began)
    return worst


def main() -> None:
    """Measure, print, save."""
    figures: dict[str, float] = {}
    for name, verify, endings in (
        ("robust", math_robust.verify, ENDINGS),
        ("strict", math_strict.verify, ENDINGS),
        ("gsm8k", gsm8k.verify, GSM8K_ENDINGS),
    ):
        for length in (0, 2_000, 20_000):
            figures[f"{name}_{length}_chars_per_s"] = rate(verify, responses(2000, length, endings))
    algebra = [("symbolic", (f"{n}\\sqrt{{2}}", f"\\sqrt{{{2 * n * n}}}")) for n in range(2, 202)]
    pool = Pool(2, Setup(10.0, cpu_budget_s=math_robust.SYMBOLIC_CPU_SECONDS))
    figures["symbolic_2_workers_per_s"] = pool_rate(pool, algebra)
    figures["symbolic_slowest_hostile_s"] = slowest_hostile(pool)
    pool.close()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "reward.py"
        path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
        pool = Pool(2, Setup(10.0, CustomFunction(str(path))))
        jobs = [("custom", ("s", response, truth, {})) for response, truth in responses(4000, 2_000)]
        figures["custom_function_2_workers_per_s"] = pool_rate(pool, jobs)
        pool.close()
    figures = {key: round(value, 3) for key, value in figures.items()} | {
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
