"""Ending a group of processes without leaving its shared memory behind."""

import contextlib
import os
import signal
import time
from pathlib import Path

RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


def end_group(group: int, grace_seconds: float = 2.0) -> None:
    """Kill a process group except Python's resource tracker, which then removes what they left and ends by itself."""
    deadline = time.monotonic() + grace_seconds
    while members := killable(group):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def killable(group: int) -> list[int]:
    """Living members of a process group, without resource trackers, ourselves last."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, pgrp = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                if int(pgrp) == group and state != "Z" and RESOURCE_TRACKER not in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return sorted(found, key=lambda pid: (pid == os.getpid(), pid))
