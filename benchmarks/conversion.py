"""What a conversion costs: Hugging Face → Megatron → Hugging Face against copying the same bytes.

`resharding.py --part conversion` calls it. Every way runs in a process of its own; memory is what that process
allocates while it converts (files that it maps are not counted: the system takes them back when it wants).
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def allocated() -> int:
    """Bytes of this process that are no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most that was allocated over what was at the start, sampled every two milliseconds."""

    def __enter__(self) -> "Peak":
        self.start, self.bytes, self.stop = allocated(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop.wait(0.002):
            self.bytes = max(self.bytes, allocated() - self.start)

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join()


def convert(way: str, source: str, target: str, like: str) -> dict[str, float]:
    """One conversion, in this process."""
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
    from checkpoint_tools.megatron_files import make_plan
    from megatron_dapo.models.architecture import Architecture

    make_plan(Architecture.from_dir(like))  # starts the world of one rank, which is no part of converting
    with Peak() as peak:
        start = time.perf_counter()
        if way == "to-megatron":
            hf_to_megatron(source, target)
        else:
            megatron_to_hf(source, target, hf_dir=like, file_bytes=200 << 20)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mib": peak.bytes / 2**20}


def copy(source: str, target: str) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in Path(target).iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # conversions make their files durable, too
    return time.perf_counter() - start


def layer_mib(directory: str) -> float:
    """The largest layer, or tensor outside the layers."""
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.tables import hf_shapes

    sizes: dict[str, int] = {}
    for name, shape in hf_shapes(Architecture.from_dir(directory)).items():
        parts = name.split(".")
        key = parts[2] if parts[1] == "layers" else name
        elements = 1
        for n in shape:
            elements *= n
        sizes[key] = sizes.get(key, 0) + 4 * elements
    return max(sizes.values()) / 2**20


def measure(directory: str) -> dict[str, Any]:
    """Both directions for the model in `directory`, against `cp`."""
    weights = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, Any] = {"weights_mib": weights / 2**20, "largest_layer_mib": layer_mib(directory)}
        found["cp_seconds"] = copy(directory, f"{scratch}/copy")
        ways = {"to-megatron": (directory, f"{scratch}/megatron"), "to-hf": (f"{scratch}/megatron", f"{scratch}/hf")}
        for way, (source, target) in ways.items():
            command = [sys.executable, str(Path(__file__)), way, source, target, directory]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
            found[way]["seconds_over_cp"] = found[way]["seconds"] / found["cp_seconds"]
            found[way]["peak_over_layer"] = found[way]["peak_mib"] / found["largest_layer_mib"]
    return found


if __name__ == "__main__":  # saving starts helper processes that import this file
    print(json.dumps(convert(*sys.argv[1:])))
