"""What a device is to a plan: memory, arithmetic and three bandwidths. From the vendors' data sheets; overridable."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megatron_dapo.errors import UserError


@dataclass(frozen=True)
class Device:
    """One accelerator. Bandwidths are per device and direction, in GB/s (1e9 bytes)."""

    name: str
    memory_gib: float  # what a program can allocate
    tflops: float  # dense bfloat16, without sparsity
    memory_gbs: float  # its own memory
    node_gbs: float  # to the other devices of its node
    network_gbs: float  # to other nodes: its share of the node's network cards
    per_node: int = 8
    per_host: int = 8  # under one operating system, where that is less than what `node_gbs` reaches

    @property
    def host_devices(self) -> int:
        """Devices that a rollout engine, which is a process of one host, can have."""
        return min(self.per_node, self.per_host)

    @property
    def memory(self) -> int:
        """Bytes that a program can allocate."""
        return int(self.memory_gib * 2**30)


DEVICES = {
    device.name: device
    for device in (
        Device("A100-40GB", 39.4, 312, 1555, 300, 25),
        Device("A100", 79.3, 312, 2039, 300, 25),
        Device("A800", 79.3, 312, 2039, 200, 25),
        Device("H100", 79.1, 989, 3350, 450, 50),
        Device("H800", 79.1, 989, 3350, 200, 50),
        Device("H20", 95.0, 148, 4000, 450, 50),
        Device("H200", 139.8, 989, 4800, 450, 50),
        Device("B200", 178.3, 2250, 8000, 900, 50),
        Device("GB200", 184.0, 2500, 8000, 900, 50, per_node=72, per_host=4),  # an NVL72 rack is one node to NCCL
        Device("L40S", 44.4, 362, 864, 32, 12.5),
        Device("MI300X", 191.5, 1307, 5300, 448, 50),
        # A core of a host: ranks share its memory, and gloo goes through it.
        Device("cpu", 8.0, 0.05, 10, 2, 1, per_node=64, per_host=64),
    )
}
_NAMES = {name.lower(): name for name in DEVICES} | {"a100-80gb": "A100", "h100-sxm": "H100"}


def device(name: str, changes: Mapping[str, float] | None = None) -> Device:
    """The device of this name, with some of its numbers replaced. Raises UserError naming what is known."""
    found = _NAMES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.0)[0]
        raise UserError(f"device={name} is not in the table; nearest is {_NAMES[near]}, known are {', '.join(DEVICES)}")
    numbers = {field.name for field in fields(Device)} - {"name"}
    for key, value in (changes or {}).items():
        if key not in numbers:
            raise UserError(f"device.{key}={value}: a device has {', '.join(sorted(numbers))}")
        if value <= 0:
            raise UserError(f"device.{key}={value}: must be positive")
    typed = {
        key: int(value) if key in ("per_node", "per_host") else float(value) for key, value in (changes or {}).items()
    }
    return replace(DEVICES[found], **typed)  # type: ignore[arg-type]
