"""A light rank for the launchers' tests: real torchrun, real signals, no model. `key=value` words say how it behaves.

Writes what happened to $EVENTS: one line per event. Rank 0 makes steps until it is asked to stop or has made them all.
"""

import os
import sys
import time
from pathlib import Path

from megatron_dapo.errors import UserError
from megatron_dapo.runtime.failure import StopRequest, ignore_stop_signals, run_rank


def refuse() -> None:
    raise UserError("parallel.tensor=3: use 2")


def main() -> int:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    restart = int(os.environ["LAUNCH_ATTEMPT"])
    events, steps = Path(os.environ["EVENTS"]), int(os.environ.get("STEPS", "3"))
    done, failed = (events / f"{what}-{os.environ['TORCHELASTIC_RUN_ID']}-{restart}" for what in ("done", "failed"))

    def tell(what: str) -> None:
        with open(events / f"rank-{rank}", "a") as file:
            file.write(f"{what}\n")

    tell(f"started world={world} restart={restart} words={' '.join(sys.argv[1:])}")
    if rank != "0":
        ignore_stop_signals()
        while not (done.exists() or failed.exists()):  # as a rank sees a dead peer by its closed socket
            time.sleep(0.1)
        return 0 if done.exists() else 1
    if os.environ.get("FAIL_FIRST") == "user":
        failed.touch()
        run_rank(refuse)
    if os.environ.get("FAIL_FIRST") == "1" and restart == 0:
        failed.touch()
        return 1
    stop = StopRequest()
    stop.install()
    tell("listening")
    for step in range(steps):
        if stop:
            tell("stopped")
            break
        time.sleep(0.2)
        tell(f"step {step + 1}")
    done.touch()
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
