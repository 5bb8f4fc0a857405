"""FLOPs by architecture agree with counting the matrix products of a forward pass."""

import pytest

from megatron_dapo.metrics import MlaDims, ModelDims, compute, efficiency_metrics, merge, peak_tflops
from megatron_dapo.metrics.efficiency import flops_per_token, forward_flops

DENSE = ModelDims(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, ffn=16, head=32)
MOE = ModelDims(
    layers=3, hidden=8, heads=4, kv_heads=2, head_dim=4, ffn=16, head=32,
    experts=6, topk=2, expert_ffn=4, shared_ffn=5, moe_layers=2,
)  # fmt: skip


def matmul(*shape: int) -> float:
    n = 2.0
    for size in shape:
        n *= size
    return n


def test_dense_model_counted_by_hand():
    qkvo = matmul(8, 16) + 2 * matmul(8, 8) + matmul(16, 8)
    mlp = 3 * matmul(8, 16)
    assert flops_per_token(DENSE) == 2 * (qkvo + mlp) + matmul(8, 32)
    scores = sum(2 * matmul(1, 16, i + 1) for i in range(5))  # QKᵀ and AV, each over the visible keys of each token
    assert forward_flops(DENSE, [5]) == 5 * flops_per_token(DENSE) + 2 * scores


def test_moe_counts_active_experts_only():
    qkvo = matmul(8, 16) + 2 * matmul(8, 8) + matmul(16, 8)
    moe = matmul(8, 6) + 2 * 3 * matmul(8, 4) + 3 * matmul(8, 5)
    assert flops_per_token(MOE) == 3 * qkvo + 3 * matmul(8, 16) + 2 * moe + matmul(8, 32)


def test_qwen3_30b_a3b_has_three_billion_active_parameters():
    dims = ModelDims(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, head=151936,
        experts=128, topk=8, expert_ffn=768, moe_layers=48,
    )  # fmt: skip
    assert flops_per_token(dims) / 2 == pytest.approx(3.03e9, rel=0.01)  # 3.3 B active less the input embedding


def test_deepseek_v3_has_37_billion_active_parameters():
    mla = MlaDims(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    dims = ModelDims(
        layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18432, head=129280,
        experts=256, topk=8, expert_ffn=2048, shared_ffn=2048, moe_layers=58, mla=mla,
    )  # fmt: skip
    assert flops_per_token(dims) / 2 == pytest.approx(36.6e9, rel=0.02)  # 37.5 B less the input embedding


def test_packing_does_not_change_flops_but_longer_sequences_do():
    assert forward_flops(DENSE, [3, 4]) == forward_flops(DENSE, [3]) + forward_flops(DENSE, [4])
    assert forward_flops(DENSE, [8]) > forward_flops(DENSE, [4, 4])


def test_metrics_and_their_merging():
    def metrics(seconds: float):
        return efficiency_metrics("update_actor", DENSE, [5, 7], seconds, 2, training=True, peak_tflops=1e-6)

    total = 3 * forward_flops(DENSE, [5, 7]) / 1e12
    got = compute(metrics(0.5))
    assert got["perf/tflops/update_actor"] == pytest.approx(total / 1.0)
    assert got["perf/mfu/update_actor"] == pytest.approx(total / 1e-6)
    merged = compute(merge(metrics(0.5), metrics(1.5)))
    assert merged["perf/tflops/update_actor"] == pytest.approx(2 * total / 4.0)
    assert "perf/mfu/ref" not in compute(efficiency_metrics("ref", DENSE, [5], 1.0, 1, training=False))
    assert efficiency_metrics("ref", DENSE, [], 0.0, 1, training=False) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("AMD EPYC", None),
    ],
)
def test_peaks_by_device_name(name, peak):
    assert peak_tflops(name) == peak
