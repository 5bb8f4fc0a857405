"""The pool of ranks of the distributed tests."""

from tests.distributed.conftest import ranks  # noqa: F401
