"""What a rank does in a layout-parity case: three optimizer steps of the real engine, compared in Hugging Face's space.

Gradients and parameters of every rank are looked up in the single rank's result through the slice table, box by box,
so that every shard of every copy on every rank is compared, and the table itself with it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

STEPS = 3
ROWS = 8
OPTIM: dict[str, Any] = dict(lr=1e-3, weight_decay=0.1, clip_grad=1.0, eps=1e-4)


@dataclass(frozen=True)
class Case:
    """One layout of one model, and what is changed about it."""

    name: str
    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # ModelConfig
    undo: str = ""  # a repair to take out, see UNDO
    even: bool = False  # sequences of one length, so that no layout adds padding tokens
    micro: int = 2  # rows per micro-batch
    backwards: bool = False  # micro-batches, and the rows in them, in reversed order

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Outcome:
    """Largest differences from the single rank, over everything this rank holds."""

    log_probs: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    gradient_at: str = ""
    gradient_l2: float = 0.0  # of the whole gradient, relative to its norm
    grad_norm: float = 0.0
    logged: float = 0.0  # the reported load-balancing loss
    parameter: float = 0.0
    parameter_at: str = ""


def make_rows(vocab: int, even: bool, rows: int = ROWS) -> TensorDict:
    """Prompts and responses of very different lengths, with weights per token that no symmetry hides."""
    g = torch.Generator().manual_seed(3)
    prompt = torch.full((rows,), 8) if even else torch.randint(1, 12, (rows,), generator=g)
    response = torch.full((rows,), 16) if even else torch.randint(1, 20, (rows,), generator=g)
    width = int(response.max())
    mask = torch.arange(width)[None] < response[:, None]
    return TensorDict(
        {
            "prompts": torch.randint(0, vocab, (rows, int(prompt.max())), generator=g),
            "prompt_length": prompt,
            "responses": torch.randint(0, vocab, (rows, width), generator=g),
            "response_length": response,
            "response_mask": mask & (torch.rand(rows, width, generator=g) > 0.2),
            "weight": torch.randn(rows, width, generator=g),
        },
        batch_size=[rows],
    )


def weighted_loss(count: int) -> Callable[..., Any]:
    """Σ weight · mask · (logp + 0.1 H) / global count: linear in both statistics, so both gradients matter."""
    from megatron_dapo.metrics import Sum

    def loss(tokens: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, Any]:
        width = tokens["log_probs"].shape[1]
        weight = (rows["weight"] * rows["response_mask"])[:, :width]
        value = (weight * (tokens["log_probs"] + 0.1 * tokens["entropy"])).sum() / count
        return value, {"loss": Sum(float(value.detach()))}

    return loss


def run_case(case: Case, hf_dir: str, reference: str) -> Outcome | None:
    """On every rank of the world. Without a reference file yet this is the single rank, which writes it."""
    with ExitStack() as stack:
        if case.undo:
            stack.enter_context(UNDO[case.undo]())
        found = _train(case, hf_dir)
    if not Path(reference).exists():
        assert dist.get_world_size() == 1
        torch.save(found, reference)
        return None
    return _compare(found, torch.load(reference, weights_only=False))


def engine_of(case: Case, hf_dir: str, steps: int = STEPS, value_head: bool = False) -> tuple[Any, Any]:
    """A trainable engine in this case's layout, and what this rank of it holds, in Hugging Face's space."""
    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.config.training import OptimConfig
    from megatron_dapo.engine.engine import MegatronEngine
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.megatron_config import topology_of
    from megatron_dapo.models.tables import megatron_slices
    from megatron_dapo.parallel.groups import init_distributed

    arch = Architecture.from_dir(hf_dir)
    parallel = ParallelConfig(**case.parallel)
    topology = topology_of(parallel, dist.get_world_size())
    init_distributed(topology, seed=1)
    model = ModelConfig(path=hf_dir, **({"dtype": "float32"} | case.settings))
    given = dict(hf_dir=Path(hf_dir), optim=OptimConfig(**OPTIM), total_steps=steps, value_head=value_head)
    engine = MegatronEngine(arch, model, parallel, topology, **given)
    return engine, megatron_slices(arch, topology, dist.get_rank(), value_head=value_head)


def _train(case: Case, hf_dir: str) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu

    engine, layout = engine_of(case, hf_dir)
    arch = engine.arch
    rows = make_rows(arch.vocab, case.even)
    count = int(rows["response_mask"].sum())
    dp, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    order = torch.arange(ROWS).flip(0) if case.backwards else torch.arange(ROWS)
    parts = list(order.split(case.micro))
    micro = [rows[part] for part in parts][dp::size]

    outputs = engine.forward(micro, ["log_probs", "entropy"])
    found: dict[str, Any] = {"log_probs": {}, "gradients": None}
    for part, values in zip(parts[dp::size], outputs, strict=False):  # no outputs before the last pipeline stage
        found["log_probs"] |= dict(zip(part.tolist(), values["log_probs"], strict=True))
    step = engine.trainable.optimizer.step

    def keep_gradients() -> Any:
        if found["gradients"] is None:
            found["gradients"] = boxes(layout, full_gradients(engine))
        return step()

    engine.trainable.optimizer.step = keep_gradients
    found["loss"], found["grad_norm"], found["logged"] = [], [], []
    for number in range(STEPS):
        engine.set_step(number + 1)
        result = engine.train_step(micro, weighted_loss(count), ["log_probs", "entropy"])
        found["loss"].append(total_loss(result.metrics))
        found["grad_norm"].append(result.grad_norm)
        if "actor/load_balancing_loss_aux" in result.metrics:
            noted = torch.tensor(result.metrics["actor/load_balancing_loss_aux"].total)
            dist.all_reduce(noted, group=mpu.get_data_parallel_group())
            found["logged"].append(noted.item() / size)
    from megatron_dapo.models.storage import storages

    found["parameters"] = boxes(layout, storages(engine.chunks))
    return found


def total_loss(metrics: Any) -> float:
    """Sum over data-parallel ranks of the last stage's loss, known everywhere."""
    from megatron.core import parallel_state as mpu

    value = torch.tensor([metrics["loss"].value if "loss" in metrics else 0.0], dtype=torch.float64)
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        dist.all_reduce(value, group=mpu.get_data_parallel_group())
    dist.broadcast(value, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    return value.item()


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """Gradients by the table's parameter names; the distributed optimizer leaves each rank only its share of them."""
    from megatron_dapo.models.storage import unwrap

    found = {}
    for number, chunk in enumerate(engine.trainable.chunks):
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            over = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                mine = bucket.grad_data.chunk(over.size())[over.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=over)
        for name, parameter in unwrap(chunk).named_parameters():
            found[f"{number}.{name}"] = parameter.main_grad
    return found


def boxes(layout: Any, storage: dict[str, Tensor]) -> dict[tuple[Any, ...], Tensor]:
    """What this rank holds, by place in the HF tensors."""
    from megatron_dapo.models.storage import box

    return {
        (piece.tensor, piece.offset, piece.shape, piece.param): box(
            storage[piece.param], piece.param_offset, piece.shape
        )
        .detach()
        .clone()
        for piece in layout
        if piece.param in storage
    }


def worst(differences: Iterable[float]) -> float:
    """The largest, 0 of none; NaN where one is, which `max` may pass over."""
    return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())


def _row_difference(a: Tensor, b: Tensor) -> float:
    """Of one row, whatever width its micro-batch had (zeros beyond its end)."""
    width = max(len(a), len(b))
    pad = torch.nn.functional.pad
    return (pad(a, (0, width - len(a))) - pad(b, (0, width - len(b)))).abs().max().item()


def _compare(found: dict[str, Any], reference: dict[str, Any]) -> Outcome:
    rows = found["log_probs"].items()
    log_probs = worst(_row_difference(value, reference["log_probs"][row]) for row, value in rows)
    gradient, gradient_at = _largest(found["gradients"], reference["gradients"], relative=True)
    parameter, parameter_at = _largest(found["parameters"], reference["parameters"], relative=False)
    return Outcome(
        log_probs=log_probs,
        loss=worst(abs(a - b) for a, b in zip(found["loss"], reference["loss"], strict=True)),
        gradient=gradient,
        gradient_at=gradient_at,
        gradient_l2=_distance(found["gradients"], reference["gradients"]),
        grad_norm=worst(abs(a / b - 1) for a, b in zip(found["grad_norm"], reference["grad_norm"], strict=True)),
        logged=worst(abs(a - b) for a, b in zip(found["logged"], reference["logged"], strict=True)),
        parameter=parameter,
        parameter_at=parameter_at,
    )


def _whole(pieces: dict[tuple[Any, ...], Tensor]) -> dict[str, Tensor]:
    """The single rank's boxes as whole HF tensors (a tied embedding has one copy there)."""
    tensors: dict[str, Tensor] = {}
    for (name, offset, shape, _), value in pieces.items():
        end = [o + s for o, s in zip(offset, shape, strict=True)]
        old = tensors.get(name)
        size = end if old is None else [max(a, b) for a, b in zip(end, old.shape, strict=True)]
        if old is None or list(old.shape) != size:
            grown = value.new_zeros(size)
            if old is not None:
                grown[tuple(slice(n) for n in old.shape)] = old
            tensors[name] = grown
        tensors[name][tuple(slice(o, e) for o, e in zip(offset, end, strict=True))] = value
    return tensors


def _largest(
    found: dict[tuple[Any, ...], Tensor], reference: dict[tuple[Any, ...], Tensor], relative: bool
) -> tuple[float, str]:
    """Largest |difference|; relative to the largest |value| of the whole HF tensor."""
    whole = _whole(reference)
    largest, where = 0.0, ""
    for (name, offset, shape, param), value in found.items():
        expected = whole[name][tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        difference = (value - expected).abs().max().item()
        if relative:
            difference /= whole[name].abs().max().item() + 1e-12
        if not difference <= largest:
            largest, where = difference, param
        if difference != difference:
            break
    return largest, where


def _distance(found: dict[tuple[Any, ...], Tensor], reference: dict[tuple[Any, ...], Tensor]) -> float:
    """‖difference‖ / ‖reference‖ over all that this rank holds."""
    whole, error, norm = _whole(reference), 0.0, 0.0
    for (name, offset, shape, _), value in found.items():
        expected = whole[name][tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].double()
        error += (value.double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (error / norm) ** 0.5


@contextmanager
def _without_expert_marks() -> Iterator[None]:
    from megatron_dapo.models import build

    with _replaced(build, "mark_experts", lambda model: None):
        yield


@contextmanager
def _config_with(**changes: Any) -> Iterator[None]:
    from megatron_dapo.engine import engine
    from megatron_dapo.models.megatron_config import transformer_config

    def configure(*arguments: Any) -> Any:
        config = transformer_config(*arguments)
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    with _replaced(engine, "transformer_config", configure):
        yield


@contextmanager
def _without_duplicate_marks() -> Iterator[None]:
    from megatron_dapo.models import specs

    class Unmarked(specs.HostLinear):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.weight.sequence_parallel = False

    with _replaced(specs, "HostLinear", Unmarked):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


UNDO: dict[str, Callable[[], Any]] = {
    "expert marks": _without_expert_marks,
    "marks of the duplicated down projections": _without_duplicate_marks,
    "separate p2p": lambda: _config_with(overlap_p2p_comm=False, batch_p2p_comm=True),
    "globally normalised losses": lambda: _config_with(calculate_per_token_loss=True),
}
