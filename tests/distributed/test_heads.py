"""Both heads that replace the vocabulary's logits, under tensor parallelism with and without sequence parallelism."""

import pytest
import torch

from tests.distributed.parity import boxes
from tests.models.hf_models import saved


def _model(hf_dir, parallel, **head):
    import torch.distributed as dist

    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.load import load_hf
    from megatron_dapo.models.megatron_config import topology_of, transformer_config
    from megatron_dapo.parallel.groups import init_distributed

    arch, sizes = Architecture.from_dir(hf_dir), ParallelConfig(**parallel)
    topology = topology_of(sizes, dist.get_world_size())
    init_distributed(topology, seed=1)
    chunks = build_model(arch, transformer_config(arch, ModelConfig(dtype="float32"), sizes), **head)
    load_hf(chunks, arch, topology, hf_dir, value_head=head.get("value_head", False))
    return arch, topology, chunks[0]


def _packed(count=24):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, 10, count], dtype=torch.int32)
    ids = torch.randint(0, 200, (1, count), generator=torch.Generator().manual_seed(0))
    return ids, PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=count, max_seqlen_kv=count
    )


def _gradients(model, arch, topology, value_head):
    """After backward: gradients by place in the HF tensors, summed over tensor-parallel ranks where Megatron does."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from megatron_dapo.models.tables import megatron_slices

    storage = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if getattr(parameter, "sequence_parallel", False):  # finalize_model_grads does this in training
            dist.all_reduce(gradient, group=mpu.get_tensor_model_parallel_group())
        storage[f"0.{name}"] = gradient
    return boxes(megatron_slices(arch, topology, dist.get_rank(), value_head=value_head), storage)


def _run_deferred(hf_dir, parallel, deferred):
    from megatron.core import parallel_state as mpu

    from megatron_dapo.models.heads import head_weight
    from megatron_dapo.models.logprob import STATISTICS, head_statistics, token_statistics

    arch, topology, model = _model(hf_dir, parallel, deferred_head=deferred)
    ids, params = _packed()
    group = mpu.get_tensor_model_parallel_group()
    chosen = torch.arange(ids.shape[1])[::3]  # only some tokens matter
    labels = ids[0].roll(-1)[chosen]
    output = model(ids, None, None, packed_seq_params=params)[0][chosen]
    given = {"vocab": arch.vocab, "temperature": 0.8, "group": group}
    if deferred:
        found = head_statistics(output, head_weight(model), labels, STATISTICS, **given)
    else:
        found = token_statistics(output, labels, STATISTICS, **given)
    weight = torch.randn(len(STATISTICS), len(chosen), generator=torch.Generator().manual_seed(1))
    (torch.stack([found[name] for name in STATISTICS]) * weight).sum().backward()
    return {name: value.detach() for name, value in found.items()}, _gradients(model, arch, topology, False)


def _run_value(hf_dir, parallel):
    arch, topology, model = _model(hf_dir, parallel, value_head=True)
    with torch.no_grad():
        model.output_layer.weight.copy_(torch.linspace(-1, 1, arch.hidden)[None])
    ids, params = _packed()
    values = model(ids, None, None, packed_seq_params=params)[0, :, 0]
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return values.detach(), _gradients(model, arch, topology, True)


def _largest_difference(found, reference):
    """Over the boxes of every rank, relative to the largest entry of the tensor."""
    whole = {}
    for (name, _, _, _), value in reference.items():
        whole[name] = max(whole.get(name, 0.0), value.abs().max().item())
    from tests.distributed.parity import _whole

    tensors = _whole(reference)
    worst = 0.0
    for (name, offset, shape, _), value in found.items():
        expected = tensors[name][tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        worst = max(worst, (value - expected).abs().max().item() / (whole[name] + 1e-12))
    return worst


LAYOUTS = [
    ("qwen2", dict(tensor=2)),
    ("llama", dict(tensor=2, sequence_parallel=False)),
    ("qwen3_moe", dict(tensor=2)),
]


@pytest.mark.parametrize(("name", "parallel"), LAYOUTS)
def test_deferred_head(ranks, name, parallel):
    """Statistics and every gradient equal those of one rank with whole logits."""
    (statistics, reference), *_ = ranks.run(_run_deferred, 1, str(saved(name)), {}, False)
    for found, gradients in ranks.run(_run_deferred, 2, str(saved(name)), parallel, True):
        for key, value in statistics.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=0)
        assert _largest_difference(gradients, reference) < 1e-5


@pytest.mark.parametrize(("name", "parallel"), LAYOUTS)
def test_value_head(ranks, name, parallel):
    (values, reference), *_ = ranks.run(_run_value, 1, str(saved(name)), {})
    for found, gradients in ranks.run(_run_value, 2, str(saved(name)), parallel):
        torch.testing.assert_close(found, values, atol=1e-5, rtol=0)
        assert _largest_difference(gradients, reference) < 1e-5
