"""How many parameters a rank holds, in closed form: the sums of the slice table, without walking it.

Two kinds, because two groups of ranks share them: *dense* parameters are copied over the data-parallel ranks, *expert*
parameters over the expert-data-parallel ranks. Tests hold both to the slice table, exactly.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import padded_vocab
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.stages import stage_shape
from megatron_dapo.resharding.rollout_layout import padded_vocab as rollout_vocab


@dataclass(frozen=True)
class Parameters:
    """Elements of one rank: trainable ones by who replicates them, and the router biases that are not trained."""

    dense: int = 0
    expert: int = 0
    buffers: int = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.dense + other.dense, self.expert + other.expert, self.buffers + other.buffers)

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.buffers


@lru_cache(maxsize=32)
def total_parameters(arch: Architecture) -> int:
    """Elements of the Hugging Face checkpoint: one rank's, without the rows that pad the vocabulary."""
    padding = (padded_vocab(arch.vocab, 1) - arch.vocab) * arch.hidden
    return rank_parameters(arch, Topology(), 0).total - padding * (1 if arch.tied else 2)


@lru_cache(maxsize=32)
def matrix_parameters(arch: Architecture) -> int:
    """Weights that one token meets in matrix products: active experts only, no embedding look-up, no norms."""
    sharded, whole = attention_matrices(arch)
    layers = arch.layers * (sharded + whole)
    mixture = arch.mixture
    moe = len(mixture.layers) if mixture else 0
    layers += (arch.layers - moe) * 3 * arch.hidden * arch.ffn
    if mixture:
        each = mixture.topk * 3 * mixture.ffn + 3 * mixture.shared_ffn + mixture.experts
        layers += moe * arch.hidden * each
    return layers + arch.hidden * arch.vocab


def attention_matrices(arch: Architecture) -> tuple[int, int]:
    """Weights of one attention: those that tensor parallelism cuts, and those that are whole on every rank."""
    latent, hidden = arch.latent, arch.hidden
    if latent is None:
        return hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads), 0
    query = arch.heads * (latent.nope_dim + latent.rope_dim)
    value, up = arch.heads * latent.v_dim, arch.heads * (latent.nope_dim + latent.v_dim) * latent.kv_rank
    whole = (latent.kv_rank + latent.rope_dim) * hidden
    if latent.q_rank is None:
        return query * hidden + up + value * hidden, whole
    return query * latent.q_rank + up + value * hidden, whole + latent.q_rank * hidden


def _attention(arch: Architecture, tensor: int) -> int:
    """One layer's attention and its two layer norms, on one rank."""
    sharded, whole = attention_matrices(arch)
    vectors = 2 * arch.hidden + (2 * arch.head_dim if arch.qk_norm else 0)
    if arch.latent:
        vectors += arch.latent.kv_rank + (arch.latent.q_rank or 0)
    bias = (arch.heads + 2 * arch.kv_heads) * arch.head_dim // tensor if arch.qkv_bias else 0
    return sharded // tensor + whole + vectors + bias


def layer_parameters(arch: Architecture, topology: Topology, moe: bool) -> Parameters:
    """One transformer layer on one rank."""
    dense, tensor, hidden = _attention(arch, topology.tensor), topology.tensor, arch.hidden
    mixture = arch.mixture
    if not moe or mixture is None:
        return Parameters(dense + 3 * hidden * arch.ffn // tensor)
    dense += mixture.experts * hidden + 3 * hidden * mixture.shared_ffn // tensor
    experts = mixture.experts // topology.expert * 3 * hidden * mixture.ffn // topology.etp
    return Parameters(dense, experts, mixture.experts if mixture.expert_bias else 0)


@lru_cache(maxsize=4096)
def rank_parameters(arch: Architecture, topology: Topology, pp: int, value_head: bool = False) -> Parameters:
    """Everything that a rank of stage `pp` holds of one role; rows of vocabulary padding count, they are stored."""
    rows = padded_vocab(arch.vocab, topology.tensor) // topology.tensor * arch.hidden
    stage = stage_shape(arch, topology, pp)
    found = Parameters(rows if stage.embedding else 0)
    for count, kind in ((stage.moe, True), (stage.dense, False)):
        one = layer_parameters(arch, topology, kind) if count else Parameters()
        found += Parameters(count * one.dense, count * one.expert, count * one.buffers)
    if not stage.head:
        return found
    found += Parameters(arch.hidden)
    if value_head:
        return found + Parameters(arch.hidden)
    return found if arch.tied and stage.embedding else found + Parameters(rows)


@lru_cache(maxsize=256)
def engine_parameters(arch: Architecture, tensor: int) -> int:
    """Elements that rank 0 of a vLLM engine of this tensor-parallel size stores (the largest share)."""
    latent, mixture, hidden = arch.latent, arch.mixture, arch.hidden
    attention = _attention(arch, tensor)
    if latent is None and arch.kv_heads < tensor:  # KV heads are copied: each rank holds one
        extra = arch.head_dim * (tensor - arch.kv_heads) * 2
        attention += extra * hidden // tensor + (extra // tensor if arch.qkv_bias else 0)
    moe = len(mixture.layers) if mixture else 0
    total = arch.layers * attention + (arch.layers - moe) * 3 * hidden * arch.ffn // tensor
    if mixture:
        total += moe * (mixture.experts * 3 * hidden * mixture.ffn + 3 * hidden * mixture.shared_ffn) // tensor
        total += moe * mixture.experts * (hidden + mixture.expert_bias)
    rows = min(rollout_vocab(arch) // tensor, arch.vocab) * hidden
    return total + hidden + rows * (1 if arch.tied else 2)
