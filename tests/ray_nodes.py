"""One Ray cluster of two small nodes on this machine, for every test that needs one."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STORE_BYTES = 100 * 2**20


@dataclass
class Nodes:
    """A head and another node, two CPUs each; nodes may be killed and added by a test that says so."""

    cluster: Any

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, **resources: float) -> Any:
        return self.cluster.add_node(num_cpus=2, resources=resources, object_store_memory=STORE_BYTES)

    def environment(self) -> dict[str, str]:
        """For a driver that joins."""
        return {**os.environ, "RAY_ADDRESS": self.address, "PYTHONPATH": str(ROOT)}


@cache
def nodes() -> Nodes:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Nodes(Cluster(initialize_head=True, head_node_args=head))
    atexit.register(made.cluster.shutdown)
    made.add()
    made.cluster.wait_for_nodes(60)
    return made


@contextmanager
def joined() -> Iterator[None]:
    """This process as a driver of that cluster."""
    from megatron_dapo.runtime.ray import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes().address)
        with cluster(cpus=4):
            yield
