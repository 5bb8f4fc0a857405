"""Which ranks host engines, and which layouts have no place for one."""

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.trainers.generation import rollout_hosts


def hosts(*words: str, world: int = 16, node_gpus: int = 8) -> tuple[int, ...]:
    return rollout_hosts(load_config(list(words)), Topology(world=world), node_gpus=node_gpus)


def test_on_gpus_every_engine_has_its_own():
    assert hosts("rollout.tensor_parallel_size=4") == (0, 4, 8, 12)
    assert hosts("rollout.tensor_parallel_size=4", "rollout.engines=3") == (0, 4, 8)
    with pytest.raises(UserError, match=r"rollout\.engines=5 .* at most 4"):
        hosts("rollout.tensor_parallel_size=4", "rollout.engines=5")


@pytest.mark.parametrize("width", [3, 16])
def test_an_engine_does_not_span_nodes(width: int):
    with pytest.raises(UserError, match=f"tensor_parallel_size={width} does not divide the 8 GPUs .* 1, 2, 4, 8"):
        hosts(f"rollout.tensor_parallel_size={width}", world=48)


def test_on_a_cpu_host_as_many_as_asked_for():
    assert hosts("rollout.engines=2", node_gpus=0) == (0, 1)
    assert hosts("rollout.tensor_parallel_size=2", node_gpus=0) == (0,)
    assert hosts("trainer.mode=separate_async") == ()
