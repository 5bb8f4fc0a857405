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
