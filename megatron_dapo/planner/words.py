"""The words of `megatron-dapo plan`: our own (device, gpus, assume.*, device.*, model); the rest is the run's."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.config import Config, load_config
from megatron_dapo.config.compose import choices
from megatron_dapo.config.model import topology_of
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.assumptions import Assumptions, assumptions
from megatron_dapo.planner.devices import Device, device
from megatron_dapo.planner.networks import bundled_name, network

DEFAULT_DEVICE = "H100"


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    config: Config
    arch: Architecture
    topology: Topology
    device: Device
    assume: Assumptions
    recipe: str = ""


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(our own words by key, the configuration's overrides)."""
    own, overrides = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"`{word}` is not a word of plan: write key=value")
        if key in ("device", "gpus") or key.startswith(("assume.", "device.")):
            own[key] = value
        elif key == "model" and value not in choices("model"):
            overrides.append(f"model.path={value}")
        else:
            overrides.append(word)
    return own, overrides


def numbers(own: dict[str, str], prefix: str) -> dict[str, float]:
    """The own words under `prefix`, as numbers."""
    found = {}
    for key, value in own.items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = float(value)
            except ValueError:
                raise UserError(f"{key}={value}: must be a number") from None
    return found


def read_request(words: Sequence[str]) -> Request:
    """Everything a plan needs. Raises UserError or ConfigError for what is wrong with the words."""
    own, overrides = split(words)
    if "gpus" in own:
        if not own["gpus"].isdigit() or int(own["gpus"]) < 1:
            raise UserError(f"gpus={own['gpus']}: must be a positive whole number")
        overrides.append(f"parallel.world_size={own['gpus']}")
    config = load_config(overrides)
    arch = network(config.model.path)
    name = own.get("device") or ("cpu" if config.model.dtype == "float32" else DEFAULT_DEVICE)
    recipe = next((word.partition("=")[2] for word in overrides if word.startswith("recipe=")), "")
    assumed = numbers(own, "assume.")
    if name == "cpu":
        assumed = {"overhead_gib": 1.0, "engine_overhead_gib": 1.0, **assumed}
    return Request(
        config=config,
        arch=arch,
        topology=topology_of(config.parallel),
        device=device(name, numbers(own, "device.")),
        assume=assumptions(assumed),
        recipe=recipe or (bundled_name(config.model.path) or config.model.path),
    )
