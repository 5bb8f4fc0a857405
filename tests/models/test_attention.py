"""Host attention on packs: rectangles, zigzag order, gradients, against one plain SDPA call per sequence."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dapo.models import attention
from megatron_dapo.models.attention import HostAttention, zigzag_index, zigzag_slice

LENGTHS = (5, 40, 1, 7, 7, 12, 39)


@pytest.fixture
def core(one_rank):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)

    def build(mask=AttnMaskType.causal):
        return HostAttention(config, 1, mask, "self")

    return build


def one_by_one(q, k, v, causal):
    outputs, start = [], 0
    for n in LENGTHS:
        part = [x[start : start + n].transpose(0, 1)[None] for x in (q, k, v)]
        o = F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True)
        outputs.append(o[0].transpose(0, 1).reshape(n, -1))
        start += n
    return torch.cat(outputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_packed_equals_one_by_one(core, causal, value_dim):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, value_dim)))
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    module = core(AttnMaskType.causal if causal else AttnMaskType.no_mask)
    weight = torch.randn(total, 4 * value_dim)
    gradients = []
    for output in (module(q, k, v, packed_seq_params=params), one_by_one(q, k, v, causal)):
        (output * weight).sum().backward()
        gradients.append((output.detach(), q.grad, k.grad, v.grad))
        q.grad = k.grad = v.grad = None
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_a_pack_needs_few_calls():
    bounds = tuple(torch.tensor([0, *([20, 25, 30, 24] * 10)]).cumsum(0).tolist())
    assert len(attention._plan(bounds, 1, 0, True, torch.device("cpu")).rectangles) <= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_shares_and_their_inverse(ranks):
    cu = torch.tensor([0, 8, 24, 56])
    x = torch.arange(56)
    shares = [zigzag_slice(x, cu, ranks, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares)[zigzag_index(cu, ranks)], x)
    if ranks == 2:
        assert shares[0][:4].tolist() == [0, 1, 6, 7] and shares[1][:4].tolist() == [2, 3, 4, 5]
    if ranks > 1:
        with pytest.raises(ValueError, match="multiple of"):
            zigzag_slice(torch.arange(7), torch.tensor([0, 7]), ranks, 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_plan_covers_the_causal_square(ranks):
    """Over all ranks, every query of every sequence sees exactly the keys up to itself."""
    bounds = (0, 8, 24, 56)
    for rank in range(ranks):
        mine = zigzag_slice(torch.arange(56), torch.tensor(bounds), ranks, rank)
        for r in attention._plan(bounds, ranks, rank, True, torch.device("cpu")).rectangles:
            for row, slot in ((i // r.queries.shape[1], i % r.queries.shape[1]) for i in r.real.tolist()):
                position = int(mine[r.queries[row, slot]])
                seen = r.keys[row][r.mask[row, 0, slot]].tolist()
                start = max(b for b in bounds if b <= position)
                assert seen == list(range(start, position + 1))
