"""Token statistics equal the textbook formulas, values and gradients, for any chunking and any split of the vocabulary."""

import pytest
import torch

from megatron_dapo.models import logprob
from megatron_dapo.models.logprob import STATISTICS, token_statistics


def textbook(logits, labels, vocab, temperature):
    log_p = (logits[:, :vocab].double() / temperature).log_softmax(-1)
    p = log_p.exp()
    return {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(p * log_p).sum(-1),
        "sum_pi_squared": p.square().sum(-1),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 700])
def test_values_and_gradients(monkeypatch, temperature, chunk_bytes):
    monkeypatch.setattr(logprob, "_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    logits = (torch.randn(23, 40) * 3).requires_grad_()
    labels = torch.randint(0, 37, (23,))
    weights = {name: torch.randn(23) for name in STATISTICS}
    ours = token_statistics(logits, labels, STATISTICS, vocab=37, temperature=temperature)
    sum((ours[name] * weights[name]).sum() for name in STATISTICS).backward()
    mine, logits.grad = logits.grad, None
    theirs = textbook(logits, labels, 37, temperature)
    sum((theirs[name] * weights[name]).sum() for name in STATISTICS).backward()
    for name in STATISTICS:
        torch.testing.assert_close(ours[name].double(), theirs[name], atol=2e-6, rtol=0)
    torch.testing.assert_close(mine, logits.grad, atol=5e-6, rtol=0)
    assert torch.all(mine[:, 37:] == 0)


def test_only_what_is_asked_for():
    logits, labels = torch.randn(5, 8), torch.randint(0, 8, (5,))
    assert set(token_statistics(logits, labels, ["entropy"], vocab=8)) == {"entropy"}
    with pytest.raises(ValueError, match="logprobs"):
        token_statistics(logits, labels, ["logprobs"], vocab=8)


def test_entropy_alone_has_its_gradient():
    logits = torch.randn(5, 8, requires_grad=True)
    labels = torch.randint(0, 8, (5,))
    assert torch.autograd.gradcheck(
        lambda x: token_statistics(x.float(), labels, ["entropy"], vocab=8)["entropy"].double(),
        logits.double(),
        eps=1e-3,
        atol=1e-3,
    )


def test_bfloat16_logits_are_not_rounded_again():
    logits = torch.randn(64, 100).bfloat16()
    labels = torch.randint(0, 100, (64,))
    ours = token_statistics(logits, labels, ["log_probs"], vocab=100)["log_probs"]
    torch.testing.assert_close(ours.double(), textbook(logits, labels, 100, 1.0)["log_probs"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("head_bytes", [1 << 20, 800])
def test_from_hidden_states(monkeypatch, head_bytes):
    """Kept or computed again, whole or in parts: the same values and gradients as from logits."""
    monkeypatch.setattr(logprob, "_HEAD_CHUNK_BYTES", head_bytes)
    monkeypatch.setattr(logprob, "_KEEP_BYTES", head_bytes)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    labels, factor = torch.randint(0, 37, (23,)), torch.randn(3, 23)
    gradients = []
    for statistics in (
        logprob.head_statistics(hidden, weight, labels, STATISTICS, vocab=37, temperature=0.7),
        token_statistics(hidden @ weight.t(), labels, STATISTICS, vocab=37, temperature=0.7),
    ):
        torch.stack([statistics[name] for name in STATISTICS]).mul(factor).sum().backward()
        gradients.append((*(statistics[name].detach() for name in STATISTICS), hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_tokens_still_have_a_graph():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    found = logprob.head_statistics(hidden, weight, torch.zeros(0, dtype=torch.long), STATISTICS, vocab=8)
    sum(value.sum() for value in found.values()).backward()
    assert weight.grad.shape == (8, 4) and not weight.grad.any()
