"""The training engine of one rank: packed micro-batches through Megatron's schedule, forward only or with an update.

One instance per role (actor, reference, critic). The loss plugs in as a function of per-token outputs; every loss is
a sum over tokens divided by a count that is fixed per optimizer step, so any split of the work gives one gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.config.model import ModelConfig, ParallelConfig
from megatron_dapo.config.training import OptimConfig
from megatron_dapo.engine.optimizer import build_optimizer, build_scheduler, ddp_config
from megatron_dapo.engine.packed import PackedMicroBatch, pack_rows, unpack, whole_context
from megatron_dapo.engine.router_losses import expert_bias, padding_mask, take_router_losses
from megatron_dapo.engine.routing import LocalChoice, Routers, RowRouting, expert_counts, to_rows
from megatron_dapo.metrics import Metrics, reduce, settle
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.build import build_model
from megatron_dapo.models.heads import head_weight
from megatron_dapo.models.load import load_hf
from megatron_dapo.models.logprob import head_statistics
from megatron_dapo.models.megatron_config import transformer_config
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import Topology

TokenOutputs = dict[str, Tensor]  # name -> [b, r], each response token's value
Result = Callable[[Tensor, PackedMicroBatch], tuple[Tensor, Any]]
LossFunction = Callable[[TokenOutputs, TensorDict], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Trainable:
    """What an engine has besides its model when it is updated."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


@dataclass(frozen=True)
class Recording:
    """What the routers of this rank chose in one pass over micro-batches, local token by local token."""

    micro_batches: list[PackedMicroBatch]
    choices: list[LocalChoice]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: merged metrics of this rank's micro-batches (empty off the last stage), norm and rate."""

    metrics: Metrics
    grad_norm: float
    lr: float


class MegatronEngine:
    """`optim=None` makes a forward-only engine; `value_head=True` a critic that outputs `values`."""

    def __init__(
        self,
        arch: Architecture,
        model: ModelConfig,
        parallel: ParallelConfig,
        topology: Topology,
        *,
        hf_dir: Path | None,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        value_head: bool = False,
        temperature: float = 1.0,
    ):
        self.arch, self.temperature, self.value_head = arch, temperature, value_head
        self.config = transformer_config(arch, model, parallel)
        self.chunks: list[GPTModel] = build_model(arch, self.config, value_head=value_head, deferred_head=True)
        if hf_dir is not None:
            load_hf(self.chunks, arch, topology, hf_dir, value_head=value_head)
        self.routers = Routers(self.chunks, arch)
        self.recorded: Recording | None = None
        self.wrapped: list[torch.nn.Module] = list(self.chunks)
        self.training = None if optim is None else self._make_trainable(model, optim, total_steps)

    def _make_trainable(self, model: ModelConfig, optim: OptimConfig, total_steps: int) -> Trainable:
        ddp = ddp_config(model.megatron_ddp)
        wrapped = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        optimizer = build_optimizer(wrapped, optim, self.config.params_dtype, model.megatron_optimizer)
        if ddp.overlap_grad_reduce:  # else the schedule would begin to reduce after every micro-batch
            no_sync = [chunk.no_sync for chunk in wrapped]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = optimizer.scale_loss
        self.wrapped = list(wrapped)
        return Trainable(wrapped, optimizer, build_scheduler(optimizer, optim, total_steps))

    @property
    def trainable(self) -> Trainable:
        """Optimizer and schedule; a forward-only engine has none and says so."""
        if self.training is None:
            raise RuntimeError("this engine was built without an optimizer and cannot be updated")
        return self.training

    def set_step(self, step: int) -> None:
        """Learning rate and weight decay of trainer step `step` (from 1)."""
        scheduler = self.trainable.scheduler
        scheduler.step(step - scheduler.num_steps)

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        return float(self.trainable.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[TensorDict], outputs: Sequence[str], record: bool = False
    ) -> list[TokenOutputs]:
        """Per micro-batch, in order, the named outputs of each response token; empty unless on the last stage.

        With `record` the routing of this pass can be asked for afterwards (`expert_counts`, `row_routing`).
        """

        def keep(output: Tensor, batch: PackedMicroBatch) -> tuple[Tensor, TokenOutputs]:
            tokens = self._token_outputs(output, batch, outputs)
            return torch.zeros((), device=output.device), {name: value.cpu() for name, value in tokens.items()}

        return self._run(micro_batches, keep, forward_only=True, record=record)

    def expert_counts(self) -> Int[Tensor, "layers experts"]:
        """How often this rank's tokens chose each expert in the last recorded pass; summed over all ranks, the total.

        Layers are the MoE layers of the whole model, in order; those of other pipeline stages are zero here.
        """
        mixture, found = self.arch.mixture, self._recording()
        assert mixture is not None
        layers = len(self.routers.moe_layers)
        return expert_counts(found.choices, found.micro_batches, layers, mixture.experts)

    def row_routing(self) -> list[RowRouting]:
        """Per micro-batch of the last recorded pass, all tokens' experts in this stage's layers. Collective."""
        found, mixture = self._recording(), self.arch.mixture
        dtype = torch.uint8 if mixture is None or mixture.experts <= 256 else torch.int16
        return [to_rows(choice, batch, dtype) for choice, batch in zip(found.choices, found.micro_batches, strict=True)]

    def _recording(self) -> Recording:
        if self.recorded is None:
            raise RuntimeError("no pass with record=True has been made")
        return self.recorded

    @torch.no_grad()
    def logits(self, rows: TensorDict) -> Tensor | None:
        """This rank's vocabulary share of the logits `[t, v/tp]` of the packed rows; None unless on the last stage."""

        def keep(output: Tensor, batch: PackedMicroBatch) -> tuple[Tensor, Tensor]:
            logits = (output[0] @ head_weight(self.chunks[-1]).t()).float()
            whole = whole_context(logits, batch, mpu.get_context_parallel_group())
            return torch.zeros((), device=output.device), whole.cpu()

        results = self._run([rows], keep, forward_only=True)
        return results[0] if results else None

    def train_step(
        self, micro_batches: Sequence[TensorDict], loss: LossFunction, outputs: Sequence[str], record: bool = False
    ) -> StepResult:
        """One optimizer step over this rank's share of a mini-batch. `loss` returns its share of the global loss.

        `record` as in `forward`; a recomputation in the backward pass is not recorded again.
        """
        optimizer = self.trainable.optimizer
        for chunk in self.trainable.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        # Megatron divides by the micro-batches of a rank and averages over the data-parallel ranks; undo both.
        scale = len(micro_batches) * mpu.get_data_parallel_world_size()

        def scaled(output: Tensor, batch: PackedMicroBatch) -> tuple[Tensor, Metrics]:
            value, metrics = loss(self._token_outputs(output, batch, outputs), batch.rows)
            return value * scale, metrics

        metrics = self._run(micro_batches, scaled, forward_only=False, record=record)
        _, grad_norm, _ = optimizer.step()
        role = "critic" if self.value_head else "actor"
        routers = take_router_losses(self.config, len(micro_batches), role)
        routers |= expert_bias(self.chunks, self.config, role)
        return StepResult(settle(reduce(metrics) | routers), float(grad_norm), self.lr)

    def _run(
        self, micro_batches: Sequence[TensorDict], result: Result, forward_only: bool, record: bool = False
    ) -> list:
        """All micro-batches through Megatron's schedule; what `result` gave for each, on the last pipeline stage."""
        packed = [self._pack(rows) for rows in micro_batches]
        choices: list[LocalChoice] = [{} for _ in packed]
        for chunk in self.wrapped:
            chunk.train(not forward_only)

        def forward_step(
            iterator: Iterator[tuple[int, PackedMicroBatch]], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]:
            index, batch = next(iterator)
            chunk = next(number for number, one in enumerate(self.wrapped) if one is model)
            with self.routers.forward(chunk, batch, choices[index] if record else None):
                output = model(
                    batch.tokens,
                    batch.positions,
                    None,
                    packed_seq_params=_packed_seq_params(batch),
                    padding_mask=padding_mask(batch, self.config, self.chunks[chunk].pre_process),
                )
            return output, lambda tensor: result(tensor, batch)

        iterators = [iter(list(enumerate(packed))) for _ in self.wrapped]
        single = len(self.wrapped) == 1
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.wrapped[0] if single else self.wrapped,
            num_microbatches=len(packed),
            seq_length=max(batch.tokens.shape[1] for batch in packed),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        self.routers.clear()
        self.recorded = Recording(packed, choices) if record else None
        return results

    def _pack(self, rows: TensorDict) -> PackedMicroBatch:
        packed = pack_rows(
            rows,
            context_parallel=self.config.context_parallel_size,
            context_rank=mpu.get_context_parallel_rank(),
            tensor_parallel=self.config.tensor_model_parallel_size,
        )
        return packed.to(capabilities().device)

    def _token_outputs(self, output: Tensor, batch: PackedMicroBatch, names: Sequence[str]) -> TokenOutputs:
        """The last stage's hidden states [1, t, h] (critic: values [1, t, 1]) as per-response-token values.

        Only the positions that predict a response token meet the vocabulary.
        """
        group = mpu.get_context_parallel_group()
        if self.value_head:
            return {"values": unpack(output[0, :, 0].float(), batch, group)}
        chosen = head_statistics(
            output[0].index_select(0, batch.predicting),
            head_weight(self.chunks[-1]),
            batch.labels[0].index_select(0, batch.predicting),
            names,
            temperature=self.temperature,
            vocab=self.arch.vocab,
            group=mpu.get_tensor_model_parallel_group(),
        )
        nothing = output.new_zeros(output.shape[1], dtype=torch.float32)
        return {
            name: unpack(nothing.index_copy(0, batch.predicting, value), batch, group) for name, value in chosen.items()
        }


def _packed_seq_params(batch: PackedMicroBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
