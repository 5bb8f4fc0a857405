"""Repairs of Megatron-core that a host without CUDA, Transformer Engine and apex needs: where, why, which versions.

Each entry is applied to its module right after import, by the import hook of `host_cuda.py`. An entry disappears by
itself where Megatron-core is new enough (`fixed_in`); `None` means that 0.19.2, the newest looked at, still needs it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor


@dataclass(frozen=True)
class Fix:
    """One repair: `repair(module)` is called after `module` was imported."""

    module: str
    reason: str
    fixed_in: str | None
    repair: Callable[[Any], None]


@cache
def megatron_version() -> Version:
    """Version of the installed megatron-core; 0 where the package carries no metadata (a source checkout)."""
    try:
        return Version(version("megatron-core"))
    except PackageNotFoundError:
        return Version("0")


def apply(module: ModuleType) -> None:
    """Apply every repair that this module needs in the installed version."""
    for fix in FIXES:
        if fix.module == module.__name__ and (fix.fixed_in is None or megatron_version() < Version(fix.fixed_in)):
            fix.repair(module)


def _no_compilation(module: Any) -> None:
    module.jit_fuser = module.noop_decorator


def _gemm_name(module: Any) -> None:
    module.te_general_gemm = None


def _splits_to_numpy(module: Any) -> None:
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    module.maybe_move_tensor_to_cpu = to_host


def _no_engine_in_mla(module: Any) -> None:
    module.HAVE_TE = False
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(module, name, type(name, (), {}))  # a type of its own: isinstance() is then simply False
    module.fused_apply_mla_rope_for_q = module.fused_apply_mla_rope_for_kv = None


def _uneven_collectives(module: Any) -> None:
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        longest = max(sizes)
        padded = input_.new_zeros((longest, *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        everyone = input_.new_empty((longest * len(sizes), *input_.shape[1:]))
        dist.all_gather_into_tensor(everyone, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(everyone.split(longest), sizes, strict=True)])

    def scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, None, use_global_buffer)
        sizes = [int(n) for n in input_split_sizes]
        mine, ranks = sizes[group.rank()], len(sizes)
        received = input_.new_empty((ranks * mine, *input_.shape[1:]))
        dist.all_to_all_single(received, input_.contiguous(), [mine] * ranks, sizes, group=group)
        return received.view(ranks, mine, *input_.shape[1:]).sum(0)

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, scatter


def _one_random_state(module: Any) -> None:
    module._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Its check that CPU and device state do not mix would warn at every use.
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _no_fp8_without_engine(module: Any) -> None:
    checkpoint = module.CheckpointWithoutOutput
    init = checkpoint.__init__
    checkpoint.__init__ = lambda self, fp8=False, *args, **kwargs: init(self, fp8 or None, *args, **kwargs)


def _rope_in_one_gather(module: Any) -> None:
    rotate = module._apply_rotary_pos_emb_bshd

    def packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any) -> Tensor:
        bounds = tuple(cu_seqlens.tolist())
        exact = freqs.shape[0] == bounds[-1] and len(bounds) > 2  # angles given for every token of the pack
        index = _positions(bounds, cp_group.rank(), cp_group.size(), exact).to(freqs.device)
        return rotate(t.unsqueeze(1), freqs.index_select(0, index), **options).squeeze(1)

    module._apply_rotary_pos_emb_thd = packed


def _torch_adam_state(module: Any) -> None:
    optimizer = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def with_zero_state(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for p in (p for group in self.optimizer.param_groups for p in group["params"]):
                state = self.optimizer.state[p]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state_dict(self)

    def with_own_step(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for entry in self.optimizer.state.values():
            if isinstance(entry.get("step"), Tensor):
                entry["step"] = entry["step"].clone()

    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for name, value in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                value.copy_(tensors[name])

    optimizer.state_dict, optimizer.load_state_dict = with_zero_state, with_own_step
    optimizer._set_main_param_and_optimizer_states = set_states


_POSITIONS: dict[tuple[Any, ...], Tensor] = {}


def _positions(bounds: tuple[int, ...], rank: int, ranks: int, exact: bool) -> Tensor:
    """Row of the angle table for every token that this context-parallel rank holds of a pack (zigzag order)."""
    key = (bounds, rank, ranks, exact)
    if key not in _POSITIONS:
        if len(_POSITIONS) > 64:
            _POSITIONS.clear()
        rows = []
        for start, end in pairwise(bounds):
            chunk, first = (end - start) // (2 * ranks), start if exact else 0
            if ranks == 1:
                rows.append(torch.arange(first, first + end - start))
            else:
                for j in (rank, 2 * ranks - 1 - rank):
                    rows.append(torch.arange(first + j * chunk, first + (j + 1) * chunk))
        _POSITIONS[key] = torch.cat(rows)
    return _POSITIONS[key]


FIXES = (
    Fix(
        "megatron.core.jit",
        "jit_fuser is torch.compile, which builds C++ at first use on a host",
        None,
        _no_compilation,
    ),
    Fix(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm is read without Transformer Engine: NameError in the router",
        "0.17",
        _gemm_name,
    ),
    Fix(
        "megatron.core.transformer.moe.moe_utils",
        "all_to_all split sizes become numpy only if they were on CUDA; CPU tensors are refused as sizes",
        None,
        _splits_to_numpy,
    ),
    Fix(
        "megatron.core.transformer.multi_latent_attention",
        "its Transformer Engine import succeeds with mock classes, so HAVE_TE is wrongly True",
        None,
        _no_engine_in_mla,
    ),
    Fix(
        "megatron.core.tensor_parallel.mappings",
        "gloo refuses uneven all_gather and reduce_scatter, which expert and expert-tensor parallelism together need",
        None,
        _uneven_collectives,
    ),
    Fix(
        "megatron.core.tensor_parallel.random",
        "the device's random state is torch's CPU state",
        None,
        _one_random_state,
    ),
    Fix(
        "megatron.core.tensor_parallel.random",
        "`fp8 is not None` with the default False: selective recompute asks for FP8 state that is not imported",
        None,
        _no_fp8_without_engine,
    ),
    Fix(
        "megatron.core.models.common.embeddings.rope_utils",
        "packed rope loops over sequences in Python, twice a layer: slower than the layer for many short sequences",
        None,
        _rope_in_one_gather,
    ),
    Fix(
        "megatron.core.optimizer.distrib_optimizer",
        "torch's AdamW has no state before its first step and keeps `step` per parameter; loading shared ONE step "
        "tensor between all parameters, so it counted once per parameter (wrong bias correction, silently)",
        None,
        _torch_adam_state,
    ),
)
