"""Bytes that one layer keeps for the backward pass, tensor by tensor, for a packed micro-batch.

The accounting of Korthikanti et al. 2022 ("Reducing Activation Recomputation"), written anew for grouped queries, gated
MLPs, latent attention and experts, with attention that stores no scores (FlashAttention; SDPA on a host). Fused kernels
keep fewer tensors than the host's plain operations; tests hold the latter to what a real forward pass saves.
"""

from dataclasses import dataclass

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology

FP32 = 4


@dataclass(frozen=True)
class Pack:
    """The tokens that one rank sees of a micro-batch: `whole` inside tensor-parallel regions, `share` outside."""

    whole: float
    share: float
    item: int  # bytes per element
    fused: bool = True  # Transformer Engine's norms, rope and gates; False: the host's

    @classmethod
    def of(cls, tokens: float, topology: Topology, sequence_parallel: bool, item: int, fused: bool = True) -> "Pack":
        whole = tokens / topology.context
        return cls(whole, whole / topology.tensor if sequence_parallel else whole, item, fused)

    def input_bytes(self, arch: Architecture) -> float:
        """One layer's input: all that full recomputation keeps."""
        return self.share * arch.hidden * self.item


def layer_bytes(
    arch: Architecture, topology: Topology, pack: Pack, moe: bool, recomputed: frozenset[str], imbalance: float
) -> float:
    """One layer's saved tensors. `recomputed` names Megatron's modules that are not kept (selective recomputation)."""
    norms = 2 * pack.input_bytes(arch)  # the inputs of both norms
    if "layernorm" not in recomputed:
        norms *= 2 if pack.fused else 3  # their outputs, the inputs of the projections; unscaled ones too
    total = norms + _attention(arch, topology, pack, recomputed)
    dense_ffn = arch.ffn if not moe or arch.mixture is None else arch.mixture.shared_ffn
    if not (recomputed & {"mlp", "shared_experts"}):
        total += (3 if pack.fused else 4) * pack.whole * dense_ffn / topology.tensor * pack.item
    if moe and "moe" not in recomputed:
        total += _experts(arch, topology, pack, recomputed, imbalance)
    return total


def _attention(arch: Architecture, topology: Topology, pack: Pack, recomputed: frozenset[str]) -> float:
    tokens, tensor, latent = pack.whole / topology.tensor * pack.item, topology.tensor, arch.latent
    statistics = pack.whole * arch.heads / tensor * FP32
    if latent is None:
        query, key = arch.heads * arch.head_dim, max(arch.kv_heads, tensor) * arch.head_dim
        kept = query + 2 * key  # the fused projection's output, of which the values are a part
        kept += 2 * (query + key) if arch.qk_norm else query + key  # normalised; rotated
        copies = 0 if pack.fused else 2 * query + 3 * key  # SDPA's rectangles of queries, mix, keys and values
        return tokens * (kept + query + copies) + statistics  # and the mix, the output projection's input
    head = latent.nope_dim + latent.rope_dim
    down = (latent.q_rank or 0) + latent.kv_rank
    low_rank = 2 * down + latent.rope_dim  # down projections and their norms, whole on every rank
    up = 0 if "mla_up_proj" in recomputed else arch.heads * (head + latent.nope_dim + latent.v_dim)
    assembled = 0 if "mla_up_proj" in recomputed else 2 * arch.heads * head
    assembled += 0 if pack.fused else 2 * arch.heads * (head + latent.v_dim)
    return pack.share * low_rank * pack.item + tokens * (up + assembled + arch.heads * latent.v_dim) + statistics


def _experts(arch: Architecture, topology: Topology, pack: Pack, recomputed: frozenset[str], imbalance: float) -> float:
    mixture = arch.mixture
    assert mixture is not None
    rows = pack.share * mixture.topk * topology.etp * (imbalance if topology.expert > 1 else 1.0)
    width = mixture.ffn / topology.etp
    routing = 2 * pack.share * mixture.experts * FP32  # scores and probabilities
    gates = 2 * width + (0 if "moe_act" in recomputed else width)
    # the activated gate, the weighted product, and the output, which is scattered again over the expert's ranks
    plain = 0 if pack.fused else 2 * width + arch.hidden / topology.etp
    return routing + rows * (arch.hidden + gates + plain) * pack.item


def head_bytes(arch: Architecture, topology: Topology, pack: Pack, deferred: bool, training: bool) -> float:
    """The final norm and the vocabulary: logits and, in training, their gradient."""
    columns = -(-arch.vocab // topology.tensor)
    chunk = 2 * (512 if training else 128) * 2**20 + pack.whole * arch.hidden * pack.item
    logits = pack.whole * columns * pack.item * (2 if training else 1) + 3 * 32 * 2**20
    return 2 * pack.input_bytes(arch) + (min(chunk, logits) if deferred else logits)


def chunks_in_flight(topology: Topology, pp: int, micro_batches: int) -> float:
    """How many micro-batches' activations stage `pp` holds at once, in units of the whole stage (1F1B, interleaved)."""
    pipeline, chunks = topology.pipeline, topology.chunks
    if chunks == 1:
        return min(pipeline - pp, micro_batches)
    warm = 2 * (pipeline - pp - 1) + (chunks - 1) * pipeline + 1
    return min(warm, micro_batches * chunks) / chunks
