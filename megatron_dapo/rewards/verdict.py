"""What a verifier says about one response."""

from dataclasses import dataclass, field
from typing import Any

INVALID = "[INVALID]"  # the prediction of a response in which no answer was found


@dataclass(frozen=True)
class Verdict:
    """`score` in the verifier's scale (math: 1 or -1, others: 1 or 0), `acc` whether it is right, `pred` what was read.

    `detail` holds what else is worth a metric, e.g. {"symbolic": "undecided"}.
    """

    score: float
    acc: bool
    pred: str
    detail: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The form a user's reward function returns."""
        return {"score": self.score, "acc": self.acc, "pred": self.pred, **self.detail}


def signed(acc: bool, pred: str, **detail: Any) -> Verdict:
    """The scale of math rewards: 1 for right, -1 for wrong."""
    return Verdict(1.0 if acc else -1.0, acc, pred, detail)


def binary(acc: bool, pred: str, **detail: Any) -> Verdict:
    """The scale of the other rewards: 1 for right, 0 for wrong."""
    return Verdict(1.0 if acc else 0.0, acc, pred, detail)


@dataclass(frozen=True)
class Pending:
    """A question that plain rules cannot settle: the job `kind(*arguments)` for a worker, and what was read so far."""

    kind: str
    arguments: tuple[Any, ...]
    prediction: str = ""
