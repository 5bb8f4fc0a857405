"""One exception for everything that is wrong with a data file, so that callers can show it without a traceback."""

from megatron_dapo.errors import UserError


class DataError(UserError, ValueError):
    """A data file is missing, unreadable, or not what it should be. The message names the file and the way out."""
