"""Model FLOPs of a step from the true architecture, and what share of the hardware they used (TFLOP/s, MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.metrics.typed import Mean, Metrics

# Dense bf16 peaks in TFLOP/s, from the vendors' data sheets (without sparsity). The first name found in the device's
# own name counts, so longer names come first.
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A800": 312.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "A10": 125.0,
    "V100": 125.0,
    "MI355X": 2516.6,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}


@dataclass(frozen=True)
class MlaDims:
    """Multi-head latent attention (DeepSeek-V2/V3). `q_lora_rank` 0: queries are projected directly."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelDims:
    """The sizes that decide the FLOPs of a decoder. `experts` 0 is a dense model; `moe_layers` of `layers` are MoE.

    `shared_ffn` is the total width of the shared experts, `gated` whether an MLP has a gate projection (SwiGLU).
    `head` is the output width: the vocabulary for a language model, 1 for a value model.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    head: int
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: int = 0
    gated: bool = True
    mla: MlaDims | None = None


def flops_per_token(dims: ModelDims) -> float:
    """Forward FLOPs of one token outside the attention scores: 2 per weight it meets, active experts only."""
    matrices = 3 if dims.gated else 2
    dense_mlp = matrices * dims.hidden * dims.ffn
    routed = dims.topk * matrices * dims.hidden * dims.expert_ffn
    moe_mlp = dims.hidden * dims.experts + routed + matrices * dims.hidden * dims.shared_ffn
    mlp = (dims.layers - dims.moe_layers) * dense_mlp + dims.moe_layers * moe_mlp
    return 2.0 * (dims.layers * _attention_weights(dims) + mlp + dims.hidden * dims.head)


def forward_flops(dims: ModelDims, lengths: Sequence[int]) -> float:
    """Forward FLOPs over sequences of these lengths (prompt + response), causal attention inside each.

    A token at position i attends to i+1 keys, so a sequence of length n has n(n+1)/2 query-key pairs per head, each
    2·(query width) FLOPs for the score and 2·(value width) for the mix.
    """
    query, value = (dims.head_dim, dims.head_dim)
    if dims.mla is not None:
        query, value = dims.mla.qk_nope_head_dim + dims.mla.qk_rope_head_dim, dims.mla.v_head_dim
    per_pair = 2.0 * dims.heads * (query + value) * dims.layers
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return flops_per_token(dims) * sum(lengths) + per_pair * pairs


def efficiency_metrics(
    stage: str,
    dims: ModelDims,
    lengths: Sequence[int],
    seconds: float,
    gpus: int,
    *,
    training: bool,
    peak_tflops: float | None = None,
) -> Metrics:
    """`perf/tflops/{stage}` per GPU and, where the hardware's peak is known, `perf/mfu/{stage}` in [0, 1].

    `training` counts forward + backward (3 × forward). Recomputation is not counted: these are the model's FLOPs.
    """
    total = forward_flops(dims, lengths) * (3 if training else 1) / 1e12
    if seconds <= 0 or gpus < 1:
        return {}
    metrics: Metrics = {f"perf/tflops/{stage}": Mean(total, seconds * gpus)}
    if peak_tflops is not None:
        metrics[f"perf/mfu/{stage}"] = Mean(total, seconds * gpus * peak_tflops)
    return metrics


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name (`torch.cuda.get_device_name()`); None when it is not in the table."""
    for name, peak in PEAK_TFLOPS.items():
        if all(part in device_name.replace("-", " ").split() for part in name.split()):
            return peak
    return None


def _attention_weights(dims: ModelDims) -> float:
    if dims.mla is None:
        return dims.hidden * dims.head_dim * (2 * dims.heads + 2 * dims.kv_heads)  # q and o; k and v
    mla, query = dims.mla, dims.heads * (dims.mla.qk_nope_head_dim + dims.mla.qk_rope_head_dim)
    q = mla.q_lora_rank * (dims.hidden + query) if mla.q_lora_rank else dims.hidden * query
    kv_down = dims.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    kv_up = mla.kv_lora_rank * dims.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + kv_down + kv_up + dims.heads * mla.v_head_dim * dims.hidden
