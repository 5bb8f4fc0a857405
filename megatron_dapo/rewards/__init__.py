"""Rewards: verifiers that read an answer out of a response, and the manager that runs them safely over a batch.

Importing this package stays cheap (no torch), because every verifier worker process does it.
"""

from typing import TYPE_CHECKING, Any

from megatron_dapo.rewards.errors import RewardError, UnknownDataSource
from megatron_dapo.rewards.routing import compute_score

if TYPE_CHECKING:
    from megatron_dapo.rewards.manager import RewardManager

__all__ = ["RewardError", "RewardManager", "UnknownDataSource", "compute_score"]


def __getattr__(name: str) -> Any:
    """Load the manager (and torch with it) on first use."""
    if name == "RewardManager":
        from megatron_dapo.rewards.manager import RewardManager

        return RewardManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
