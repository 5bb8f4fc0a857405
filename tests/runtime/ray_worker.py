"""A light rank for the tests of the Ray runtime: no torch, whose import alone costs seconds per actor."""

import os
import time

import ray

from megatron_dapo.errors import UserError


class LightWorker:
    """`close` removes the file that the rank made: what it leaves behind shows."""

    def __init__(self, directory: str) -> None:
        self.rank = int(os.environ["RANK"])
        os.makedirs(directory, exist_ok=True)
        self.file = os.path.join(directory, f"rank-{self.rank}")
        open(self.file, "w").close()

    def place(self) -> dict[str, str]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        node = ray.get_runtime_context().get_node_id()
        return {name: os.environ[name] for name in names} | {"pid": str(os.getpid()), "node": node}

    def scale(self, share: int, *, factor: int) -> int:
        return share * factor

    def fail(self, *, rank: int, kind: str) -> None:
        if self.rank != rank:
            raise ConnectionError("my peer is gone")  # first, as a consequence
        time.sleep(0.5)
        if kind == "death":
            os._exit(3)
        raise UserError("no such file")

    def sleep(self, *, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        os.remove(self.file)
