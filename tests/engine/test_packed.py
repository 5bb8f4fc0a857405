"""Packing is a bijection: every token lands once, every response token finds its value again, for any alignment."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.engine.packed import pack_rows


def rows(lengths, prompt_width=5, response_width=6):
    prompts = torch.zeros(len(lengths), prompt_width, dtype=torch.long)
    responses = torch.zeros(len(lengths), response_width, dtype=torch.long)
    for row, (p, r) in enumerate(lengths):
        prompts[row, prompt_width - p :] = 100 * (row + 1) + torch.arange(p)
        responses[row, :r] = 100 * (row + 1) + 50 + torch.arange(r)
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "prompt_length": torch.tensor([p for p, _ in lengths]),
            "response_length": torch.tensor([r for _, r in lengths]),
        },
        batch_size=[len(lengths)],
    )


LENGTHS = [(3, 4), (1, 1), (5, 6), (2, 3)]


def test_tokens_lie_back_to_back_without_padding():
    packed = pack_rows(rows([(2, 1), (1, 2)]))
    assert packed.tokens.tolist() == [[100, 101, 150, 200, 250, 251]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.cu_seqlens.tolist() == [0, 3, 6]
    assert packed.max_seqlen == 3


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_each_response_token_is_predicted_by_the_position_before_it(tensor):
    batch = rows(LENGTHS)
    packed = pack_rows(batch, tensor_parallel=tensor)
    assert packed.tokens.shape[1] % tensor == 0
    predicted = packed.labels[0][packed.gather]
    width = packed.valid.shape[1]
    assert torch.equal(predicted[packed.valid], batch["responses"][:, :width][packed.valid])
    assert packed.valid.sum(1).tolist() == [r for _, r in LENGTHS]
    assert sorted(packed.predicting.tolist()) == sorted(packed.gather[packed.valid].tolist())


@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_shares_put_together_are_the_whole(context):
    batch = rows(LENGTHS)
    shares = [pack_rows(batch, context_parallel=context, context_rank=r) for r in range(context)]
    gathered = torch.cat([share.labels[0] for share in shares])
    whole = gathered[shares[0].restore]
    predicted = whole[shares[0].gather]
    width = shares[0].valid.shape[1]
    assert torch.equal(predicted[shares[0].valid], batch["responses"][:, :width][shares[0].valid])
    assert {share.tokens.shape for share in shares} == {shares[0].tokens.shape}
    lengths = (shares[0].cu_seqlens[1:] - shares[0].cu_seqlens[:-1]).tolist()
    assert all(length % (2 * context) == 0 for length in lengths)


@pytest.mark.parametrize("context", [1, 2])
def test_routing_follows_its_tokens_and_what_has_none_repeats_the_last(context):
    """Choice [token value, layer], known for all but a row's last token, as a rollout engine reports it."""
    batch = rows(LENGTHS)
    known = torch.tensor([p + r - 1 for p, r in LENGTHS])
    experts = torch.zeros(len(LENGTHS), int(known.max()), 2, 1, dtype=torch.long)
    for row, (p, r) in enumerate(LENGTHS):
        ids = torch.cat([batch["prompts"][row, 5 - p :], batch["responses"][row, :r]])[:-1]
        experts[row, : len(ids)] = torch.stack([ids, ids + 1000], 1)[..., None]
    batch["routed_experts"], batch["routed_length"] = experts, known
    for rank in range(context):
        packed = pack_rows(batch, context_parallel=context, context_rank=rank, tensor_parallel=2)
        tokens, routing = packed.tokens[0], packed.routing
        place = torch.arange(len(tokens)) if context == 1 else None
        assert torch.equal(routing[:, 1], routing[:, 0] + 1000) and not (routing[:, 0] == 0).any()
        same = routing[:, 0, 0] == tokens
        assert same.sum() >= packed.real.sum() - len(LENGTHS) and not (same & ~packed.real).any()
        if place is not None:
            last = (packed.cu_seqlens[:-1] + known).tolist()
            assert (~same)[: int(packed.real.sum())].nonzero().flatten().tolist() == last
            assert all(routing[p, 0, 0] == routing[p - 1, 0, 0] for p in last)
