"""Which experts every token went to, recorded by a vLLM worker on CPU, where vLLM's own recording does not run.

Routing is kept per slot of the KV cache: a slot is written when its token is computed and read when a request that
owns its block ends. So tokens whose prefix was found in the cache have their routing too, from whoever computed them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from megatron_dapo.resharding.vllm_worker import WorkerExtension


class RoutingRecorder:
    """Hooks into the routers and the model runner of one worker."""

    def __init__(self, model_runner: Any) -> None:
        self.runner = model_runner
        self.block_size: int = model_runner.cache_config.block_size
        routers = find_routers(model_runner.model)
        slots = model_runner.kv_cache_config.num_blocks * self.block_size
        experts = max(router.global_num_experts for router in routers)
        topk = max(router.top_k for router in routers)
        self.by_slot = np.zeros((slots, len(routers), topk), np.uint8 if experts <= 256 else np.uint16)
        self.step: list[Tensor | None] = [None] * len(routers)
        for layer, router in enumerate(routers):
            router.set_capture_fn(lambda ids, layer=layer: self.step.__setitem__(layer, ids))
        self.execute = model_runner.execute_model
        model_runner.execute_model = self.execute_and_record

    def execute_and_record(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = self.execute(scheduled, *args, **kwargs)
        if self.step[0] is not None and scheduled.total_num_scheduled_tokens:
            batch = self.runner.input_batch
            slots = [
                self.slots(
                    request_id, int(batch.num_computed_tokens_cpu[row]), scheduled.num_scheduled_tokens[request_id]
                )
                for row, request_id in enumerate(batch.req_ids)
            ]
            where = np.concatenate(slots)
            for layer, ids in enumerate(self.step):
                assert ids is not None
                self.by_slot[where, layer] = ids[: len(where)].numpy()
        self.step = [None] * len(self.step)
        return output

    def slots(self, request_id: str, start: int, count: int) -> np.ndarray:
        """KV-cache slots of the tokens [start, start + count) of a request."""
        blocks = np.asarray(self.runner.requests[request_id].block_ids[0])
        position = np.arange(start, start + count)
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, request_id: str, tokens: int) -> np.ndarray | None:
        """Routing [tokens, layers, top-k] of a request's first tokens; None when it holds no cache (preempted)."""
        if request_id not in self.runner.input_batch.req_id_to_index:
            return None
        return self.by_slot[self.slots(request_id, 0, tokens)]


def find_routers(model: nn.Module) -> list[BaseRouter]:
    """The routers of a model's expert layers, in the order of its layers."""
    found = [m.router for m in model.modules() if isinstance(m, MoERunner) and isinstance(m.router, BaseRouter)]
    if not found:
        raise ValueError("routed experts are to be recorded, but the rollout model has no expert layers")
    return found


class RolloutWorkerExtension(WorkerExtension):
    """Mixed into vLLM's worker: the bridge's side of a push, and the recording of routed experts."""

    megatron_dapo_recorder: RoutingRecorder

    def megatron_dapo_record_routing(self) -> None:
        self.megatron_dapo_recorder = RoutingRecorder(self.model_runner)

    def megatron_dapo_routing(self, wanted: Sequence[tuple[str, int]]) -> list[np.ndarray | None]:
        """Routing of requests (by vLLM's own ids) that have just ended; all ranks route alike."""
        return [self.megatron_dapo_recorder.read(request_id, tokens) for request_id, tokens in wanted]
