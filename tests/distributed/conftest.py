"""One pool of ranks for all distributed tests."""

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    with RankPool() as pool:
        yield pool
