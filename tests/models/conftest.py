"""A world of one rank for the tests of this folder that build models."""

import pytest


@pytest.fixture(scope="module")
def one_rank():
    from megatron_dapo.parallel.groups import destroy, init_distributed
    from megatron_dapo.parallel.topology import Topology

    topology = Topology()
    init_distributed(topology, seed=1)
    yield topology
    destroy()
