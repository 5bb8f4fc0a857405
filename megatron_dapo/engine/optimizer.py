"""Megatron's distributed Adam and its learning-rate schedule, from our `optim` section."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dapo.config.training import OptimConfig
from megatron_dapo.models.megatron_config import pass_through


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], optim: OptimConfig, dtype: torch.dtype, options: dict[str, Any]
) -> MegatronOptimizer:
    """AdamW sharded over the data-parallel ranks, fp32 main weights under bf16, clipping by the global norm.

    `options` are passed through to Megatron. Raises OptionError for those that it does not have or `optim` decides.
    """
    decided = {
        "optimizer": "adam",
        "lr": optim.lr,
        "min_lr": optim.min_lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "clip_grad": optim.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
        "overlap_param_gather": False,  # needs a loop that begins every step with the first layers' parameters
    }
    by = "the role's `optim`, model.dtype and the engine"
    chosen = pass_through("model.megatron_optimizer", options, decided, OptimizerConfig, by)
    config = OptimizerConfig(**decided, **chosen)
    return get_megatron_optimizer(config, list(chunks), config_overrides=get_standard_config_overrides(config))


def ddp_config(options: dict[str, Any]) -> DistributedDataParallelConfig:
    """How gradients are reduced: in float32, sharded; `options` as in `build_optimizer`."""
    decided = {"use_distributed_optimizer": True, "use_megatron_fsdp": False, "overlap_param_gather": False}
    defaults = {"grad_reduce_in_fp32": True, "check_for_nan_in_grad": True}
    chosen = pass_through("model.megatron_ddp", options, decided, DistributedDataParallelConfig, "the engine")
    return DistributedDataParallelConfig(**(decided | defaults | chosen))


def build_scheduler(optimizer: MegatronOptimizer, optim: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    """The schedule counts trainer steps (one per RL step), not optimizer steps: step k of the run (from 1) uses lr(k).

    Going through Megatron's scheduler is what makes `wd_mult` (no decay on norms and biases) take effect.
    """
    decay_steps = max(optim.lr_decay_steps or total_steps, optim.lr_warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
