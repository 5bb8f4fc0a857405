"""Recorded routing against transformers' router, with and without prefixes found in the cache."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_dapo.rollout import RolloutEngine, Sampling
from tests import tiny_vllm as tiny


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return tiny.engine("moe")


@torch.no_grad()
def expected(model: nn.Module, ids: list[int]) -> Tensor:
    """Top-2 experts [tokens, layers, 2] of every token, sorted."""
    logits: list[Tensor] = []
    hooks = []
    for layer in model.model.layers:
        hooks.append(
            layer.mlp.gate.register_forward_hook(
                lambda gate, args, out: logits.append(nn.functional.linear(args[0], gate.weight))
            )
        )
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([x.view(len(ids), -1).topk(2).indices for x in logits], 1).sort(-1).values


def test_routing_is_transformers_also_where_the_prefix_was_cached(engine: RolloutEngine) -> None:
    tensors = tiny.weights("moe")
    tiny.push(engine, tensors, 1)
    model = tiny.reference("moe", tensors)
    asked = tiny.requests(prompts=2, samples=3)  # 40 tokens of prompt: one block of 32 is shared
    for _ in range(2):
        for request, sample in zip(asked, engine.generate(asked), strict=True):
            ids = [*request.prompt_ids, *sample.token_ids][:-1]
            assert sample.routed_experts.shape == (len(ids), 2, 2)
            assert sample.routed_experts.dtype == np.uint8
            assert torch.equal(torch.tensor(sample.routed_experts).long().sort(-1).values, expected(model, ids))


def test_aborted_samples_have_theirs(engine: RolloutEngine) -> None:
    asked = tiny.requests(1, 2, sampling=Sampling(max_tokens=200, ignore_eos=True))
    futures = engine.submit(asked)
    engine.generate(tiny.requests(1, 1, step=1, sampling=Sampling(max_tokens=3, ignore_eos=True)))
    engine.abort()
    for future in futures:
        sample = future.result(10)
        assert sample.finish_reason == "abort"
        assert len(sample.routed_experts) == tiny.PROMPT_LENGTH + len(sample.token_ids) - 1
