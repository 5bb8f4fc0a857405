"""A light driver for the launchers' tests: a real Ray cluster, ranks without a model, in the words of `rank.py`."""

import os
import sys
import time
from pathlib import Path

from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.runtime.ray import Pool, RayWorkerGroup, cluster
from tests.runtime.ray_worker import LightWorker


def main() -> int:
    events, steps = Path(os.environ["EVENTS"]), int(os.environ.get("STEPS", "3"))

    def tell(what: str) -> None:
        with open(events / "rank-0", "a") as file:
            file.write(f"{what}\n")

    stop = StopRequest()
    with cluster(cpus=2):
        stop.install()
        group = RayWorkerGroup.start(Pool.take(2, {"CPU": 1.0}, "SPREAD"), LightWorker, (str(events / "files"),))
        places = group.call("place")
        tell(f"started world={places[0]['WORLD_SIZE']} nodes={len({p['node'] for p in places})} words={sys.argv[1:]}")
        for step in range(steps):
            if stop:
                tell("stopped")
                break
            time.sleep(0.2)
            assert group.call("scale", [1, 2], factor=10) == [10, 20]
            tell(f"step {step + 1}")
        group.close()
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
