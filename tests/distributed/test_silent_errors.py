"""Megatron's errors that raise nothing and train wrong: each test here fails without the repair it names.

(The ones that show as a difference between layouts are in test_layout_parity.py.)
"""

from pathlib import Path

import pytest
import torch

from megatron_dapo.parallel.host_fixes import Version, megatron_version
from tests.models.hf_models import saved


def _engine(hf_dir, parallel=None, **optim):
    import torch.distributed as dist

    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.config.training import OptimConfig
    from megatron_dapo.engine.engine import MegatronEngine
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.megatron_config import topology_of
    from megatron_dapo.parallel.groups import init_distributed

    arch, sizes = Architecture.from_dir(hf_dir), ParallelConfig(**(parallel or {}))
    topology = topology_of(sizes, dist.get_world_size())
    init_distributed(topology, seed=1)
    model = ModelConfig(path=hf_dir, dtype="float32")
    engine = MegatronEngine(
        arch, model, sizes, topology, hf_dir=Path(hf_dir), optim=OptimConfig(**optim), total_steps=4
    )
    engine.set_step(1)
    return engine


def _steps_after_loading(hf_dir):
    """One step, its optimizer state into a new engine, one more step there: Adam's counter of every parameter."""
    from megatron_dapo.parallel.groups import destroy
    from tests.distributed.parity import make_rows, weighted_loss

    rows = make_rows(211, even=True)
    first = _engine(hf_dir, lr=1e-3)
    first.train_step([rows], weighted_loss(100), ["log_probs", "entropy"])
    state = [part.state_dict() for part in first.trainable.optimizer.chained_optimizers]
    destroy(world=False)
    second = _engine(hf_dir, lr=1e-3)
    for part, loaded in zip(second.trainable.optimizer.chained_optimizers, state, strict=True):
        part.load_state_dict(loaded)
        for values in part.optimizer.state.values():  # what load_parameter_state would fill
            values["exp_avg"].zero_(), values["exp_avg_sq"].zero_()
    second.train_step([rows], weighted_loss(100), ["log_probs", "entropy"])
    return sorted(
        {
            float(v["step"])
            for part in second.trainable.optimizer.chained_optimizers
            for v in part.optimizer.state.values()
        }
    )


def _decayed(hf_dir):
    """One step with zero gradients: the parameters that weight decay shrank, and those it left alone."""
    from tests.distributed.parity import make_rows

    engine = _engine(hf_dir, lr=0.1, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in engine.chunks[0].named_parameters()}

    def nothing(tokens, rows):
        return tokens["log_probs"].sum() * 0, {}

    engine.train_step([make_rows(211, even=True)], nothing, ["log_probs"])
    changed = {name: not torch.equal(p, before[name]) for name, p in engine.chunks[0].named_parameters()}
    return {n for n, c in changed.items() if c}, {n for n, c in changed.items() if not c}


def _optimizer_parts(hf_dir, parallel):
    return len(_engine(hf_dir, parallel).trainable.optimizer.chained_optimizers)


def _gradient_errors():
    """Largest error of the cross-entropy's gradient: our statistics, and Megatron's fused op."""
    from megatron.core import parallel_state as mpu
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    from megatron_dapo.models.logprob import token_statistics
    from megatron_dapo.parallel.groups import init_distributed
    from megatron_dapo.parallel.topology import Topology

    init_distributed(Topology(world=2, tensor=2), seed=1)
    group = mpu.get_tensor_model_parallel_group()
    torch.manual_seed(0)
    whole, labels = torch.randn(50, 64, requires_grad=True), torch.randint(0, 64, (50,))
    weight = torch.randn(50)
    log_p = whole.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (log_p * weight).sum().backward()
    expected = whole.grad.chunk(2, 1)[group.rank()]
    errors = []
    for op in (
        lambda x: token_statistics(x, labels, ["log_probs"], vocab=64, group=group)["log_probs"],
        lambda x: -fused_vocab_parallel_cross_entropy(x.clone()[:, None], labels[:, None], group)[:, 0],
    ):
        mine = whole.detach().chunk(2, 1)[group.rank()].clone().requires_grad_()
        (op(mine) * weight).sum().backward()
        errors.append((mine.grad - expected).abs().max().item())
    return errors


def _buffers_lost_while_sent(hf_dir, deallocate):
    """Of all sends in a step of the interleaved schedule: how many had lost their buffer when they were waited for."""
    from megatron.core.pipeline_parallel import p2p_communication

    from tests.distributed.parity import make_rows, weighted_loss

    engine = _engine(hf_dir, dict(pipeline=2, virtual_pipeline=2))
    if deallocate is not None:
        engine.config.deallocate_pipeline_outputs = deallocate
    lost, communicate = [], p2p_communication._p2p_ops

    class Watched:
        def __init__(self, tensor, request):
            self.tensor, self.buffer, self.request = tensor, tensor.data_ptr(), request

        def wait(self):
            lost.append(self.tensor.data_ptr() != self.buffer)
            return self.request.wait()

    def watch(**named):
        requests = communicate(**named)
        sent = {name: Watched(named[f"tensor_{name}"], requests[name]) for name in requests if "send" in name}
        return requests | sent

    p2p_communication._p2p_ops = watch
    engine.train_step(list(make_rows(211, even=True).split(2)), weighted_loss(100), ["log_probs", "entropy"])
    return sum(lost), len(lost)


def test_adam_counts_each_step_once_after_loading(ranks):
    """Loading gave all parameters one `step` tensor, counted up once per parameter: wrong bias correction."""
    assert ranks.run(_steps_after_loading, 1, str(saved("qwen3_moe"))) == [[2.0]]


def test_norms_and_biases_do_not_decay(ranks):
    """`wd_mult` takes effect only through the scheduler; without it norms and biases decay like matrices."""
    decayed, kept = ranks.run(_decayed, 1, str(saved("qwen2")))[0]
    assert kept and all("norm" in name or name.endswith("bias") for name in kept)
    assert decayed and not any("norm" in name or name.endswith("bias") for name in decayed)


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, dict(expert=2)), (2, dict(tensor=2))])
def test_optimizer_has_the_same_parts_under_every_layout(ranks, world, parallel):
    """Without the experts' mark there is one part at EP=1 and two beyond: checkpoints would not load across."""
    assert set(ranks.run(_optimizer_parts, world, str(saved("qwen3_moe")), parallel)) == {2}


def test_the_gradient_of_log_probs_is_not_rounded_to_bfloat16(ranks):
    """Megatron's fused cross-entropy returns its gradient in bfloat16 whatever the logits' dtype: not used here."""
    for ours, fused in ranks.run(_gradient_errors, 2):
        assert ours < 1e-6 < 1e-4 < fused


def test_nothing_is_freed_while_it_is_sent(ranks):
    """gloo reads a buffer until its send is waited for; Megatron frees a stage's output before. Small ones are lucky."""
    cases = [(None, False)] + [(True, True)] * (megatron_version() < Version("0.19"))
    for deallocate, expected in cases:
        found = ranks.run(_buffers_lost_while_sent, 2, str(saved("qwen2")), deallocate)
        assert all(sent > 0 for _, sent in found) and any(lost > 0 for lost, _ in found) is expected, found
