"""Ending a group of processes without leaving its shared memory behind."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

VLLM_PREFIX = "vllm_dist_"
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


def remove_shared_memory(idents: Iterable[str]) -> None:
    """Remove what vLLM's CPU workers have shared with each other under these names and do not remove themselves."""
    for ident in idents:
        if ident.startswith(VLLM_PREFIX):
            for file in Path("/dev/shm").glob(f"*{ident}*"):
                file.unlink(missing_ok=True)


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
