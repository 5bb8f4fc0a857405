"""The one base class of errors that a user can mend: the command line prints their text alone, without a traceback."""


class UserError(Exception):
    """Something outside the program is wrong (a key, a file, a machine); the text names it and the way out."""
