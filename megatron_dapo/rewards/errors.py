"""What can go wrong with rewards as such (not with a response)."""

from megatron_dapo.errors import UserError


class RewardError(UserError, RuntimeError):
    """A reward function cannot be loaded or run, or `reward.on_failure=raise` met a failure."""


class UnknownDataSource(UserError, NotImplementedError):
    """No verifier is registered for a data source."""
