"""The table: Hugging Face tensors, their names and shapes, and which boxes of them lie where on each Megatron rank.

Loading a checkpoint, exporting one and pushing weights to the rollout engine all read this one description. Pure: it
needs neither torch nor ranks, so it answers for any topology.

Every Megatron parameter is described as *runs*: pieces of HF tensors, stacked along one dimension in the order in which
the local storage holds them. A tensor-parallel shard is a window on that stack.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from megatron_dapo.models.architecture import Architecture, Latent, Mixture
from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.parallel.stages import Stage
from megatron_dapo.parallel.topology import Coordinate, LayoutError, Topology

VOCAB_MULTIPLE = 128  # the same padding under every tensor size up to this, so that checkpoints fit any layout
VALUE_HEAD = "score.weight"  # HF's name of a one-label token classifier's head

Run = tuple[str, int, int]  # HF tensor, first row, number of rows
Shapes = dict[str, tuple[int, ...]]


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of the embedding and the output layer over all tensor-parallel ranks."""
    multiple = lcm(VOCAB_MULTIPLE, tensor)
    return (vocab + multiple - 1) // multiple * multiple


def hf_shapes(arch: Architecture, value_head: bool = False) -> Shapes:
    """Name and shape of every tensor of the HF checkpoint; with `value_head`, a critic's (score head, no lm_head)."""
    return dict(_shapes(arch, value_head))


@lru_cache(maxsize=8)
def _shapes(arch: Architecture, value_head: bool) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (arch.vocab, arch.hidden)}
    for layer in range(arch.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(arch, layer).items()}
    shapes["model.norm.weight"] = (arch.hidden,)
    for layer in mtp_layers(arch):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in (_layer_shapes(arch, layer) | _mtp_shapes(arch)).items()}
    if value_head:
        shapes[VALUE_HEAD] = (1, arch.hidden)
    elif not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, arch.hidden)
    return shapes


def mtp_layers(arch: Architecture) -> range:
    """HF's numbers of the layers that predict further tokens."""
    return range(arch.layers, arch.layers + arch.mtp_layers)


def mtp_copies(arch: Architecture) -> dict[str, str]:
    """HF tensors that repeat another one: each of these layers brings the embedding and the head that it shares."""
    head = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": head}
    return {f"model.layers.{layer}.{name}": of for layer in mtp_layers(arch) for name, of in copies.items()}


def megatron_slices(
    arch: Architecture, topology: Topology, rank: int | Coordinate, *, te: bool = False, value_head: bool = False
) -> Layout:
    """What one training rank stores. Parameters are named "<chunk>.<name in GPTModel>".

    `te` chooses the names of the Transformer Engine layer spec (norms inside the linear that follows, experts in one
    grouped module) instead of the local spec's. Raises LayoutError with every problem when the layout is illegal.
    """
    at = topology.coordinate(rank) if isinstance(rank, int) else rank
    return _slices(arch, topology, at.tp, at.pp, at.ep, at.etp, te, value_head)


@lru_cache(maxsize=4096)
def _slices(
    arch: Architecture, topology: Topology, tp: int, pp: int, ep: int, etp: int, te: bool, value_head: bool
) -> Layout:
    """Data- and context-parallel replicas store the same, so one entry answers for all of them."""
    check_layout(arch, topology)
    table = _Table(arch, topology, tp, ep, etp, _shapes(arch, value_head), te)
    slices: list[Slice] = []
    for stage in topology.stages(arch.layers):
        if stage.pp == pp:
            slices += table.chunk(stage, value_head)
    return tuple(slices)


@lru_cache(maxsize=64)
def check_layout(arch: Architecture, topology: Topology) -> None:
    """Raises LayoutError with everything that is wrong with this layout for this network."""
    problems = topology.problems(**layout_sizes(arch))
    if problems:
        raise LayoutError("illegal parallel layout: " + "; ".join(problems))


def layout_sizes(arch: Architecture) -> dict[str, int]:
    """The sizes that `Topology.problems` checks a layout against."""
    mixture = arch.mixture
    return {
        "layers": arch.layers,
        "heads": arch.heads,
        "kv_heads": arch.kv_heads,
        "experts": arch.experts,
        "expert_ffn": mixture.ffn if mixture else 0,
        "ffn": arch.ffn,
        "shared_ffn": mixture.shared_ffn if mixture else 0,
    }


@dataclass(frozen=True)
class _Table:
    """The rows of the table for one rank: the layout's sizes and the rank's place in each of them."""

    arch: Architecture
    topology: Topology
    tp: int
    ep: int
    etp: int
    shapes: Shapes
    te: bool

    def chunk(self, stage: Stage, value_head: bool) -> Iterator[Slice]:
        """All parameters of one model chunk."""
        prefix, arch = f"{stage.chunk}.", self.arch
        embedding = "model.embed_tokens.weight"
        if stage.embedding:
            yield from self._vocabulary(prefix + "embedding.word_embeddings.weight", embedding)
        for local, layer in enumerate(stage.layers):
            yield from self._layer(f"{prefix}decoder.layers.{local}.", layer)
        if stage.head:
            yield self._whole(prefix + "decoder.final_layernorm.weight", "model.norm.weight")
            if value_head:
                yield self._whole(prefix + "output_layer.weight", VALUE_HEAD)
            elif not arch.tied:
                yield from self._vocabulary(prefix + "output_layer.weight", "lm_head.weight")
            elif not stage.embedding and not arch.mtp_layers:  # the last stage's copy of a tied embedding
                yield from self._vocabulary(prefix + "output_layer.weight", embedding)
            if arch.mtp_layers and not stage.embedding:  # these layers embed tokens themselves
                yield from self._vocabulary(prefix + "embedding.word_embeddings.weight", embedding)
            for local, layer in enumerate(mtp_layers(arch)):
                yield from self._mtp_layer(f"{prefix}mtp.layers.{local}.", layer)

    def _mtp_layer(self, local: str, layer: int) -> Iterator[Slice]:
        hf = f"model.layers.{layer}."
        for norm in ("enorm", "hnorm"):
            yield self._whole(f"{local}{norm}.weight", f"{hf}{norm}.weight")
        yield from self._shard(local + "eh_proj.weight", [(hf + "eh_proj.weight", 0, self.arch.hidden)])
        yield from self._layer(local + "transformer_layer.", layer)
        yield self._whole(local + "final_layernorm.weight", hf + "shared_head.norm.weight")

    def _layer(self, local: str, layer: int) -> Iterator[Slice]:
        hf = f"model.layers.{layer}."
        attention = self._latent_attention if self.arch.latent else self._attention
        yield from attention(local, hf)
        if self.arch.is_moe_layer(layer):
            yield self._whole(local + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight")
            yield from self._experts(local + "mlp.", hf)
        else:
            norm = "mlp.linear_fc1.layer_norm_weight" if self.te else "pre_mlp_layernorm.weight"
            yield self._whole(local + norm, hf + "post_attention_layernorm.weight")
            yield from self._gated(local + "mlp.", hf + "mlp.")

    def _attention(self, local: str, hf: str) -> Iterator[Slice]:
        arch, name = self.arch, local + "self_attention."
        norm = "self_attention.linear_qkv.layer_norm_weight" if self.te else "input_layernorm.weight"
        yield self._whole(local + norm, hf + "input_layernorm.weight")
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            q, k, v = (f"{hf}self_attn.{letter}_proj.{kind}" for letter in "qkv")
            yield from self._shard(f"{name}linear_qkv.{kind}", qkv_runs(arch, q, k, v))
        yield from self._shard(
            name + "linear_proj.weight", [(hf + "self_attn.o_proj.weight", 0, arch.heads * arch.head_dim)], dim=1
        )
        if arch.qk_norm:
            for letter in "qk":
                yield self._whole(f"{name}{letter}_layernorm.weight", f"{hf}self_attn.{letter}_norm.weight")

    def _latent_attention(self, local: str, hf: str) -> Iterator[Slice]:
        latent, heads, name, source = self._latent, self.arch.heads, local + "self_attention.", hf + "self_attn."
        yield self._whole(local + "input_layernorm.weight", hf + "input_layernorm.weight")
        query = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank is None:
            yield from self._shard(name + "linear_q_proj.weight", [(source + "q_proj.weight", 0, query)])
        else:
            norm = "linear_q_up_proj.layer_norm_weight" if self.te else "q_layernorm.weight"
            yield self._whole(name + "linear_q_down_proj.weight", source + "q_a_proj.weight")
            yield self._whole(name + norm, source + "q_a_layernorm.weight")
            yield from self._shard(name + "linear_q_up_proj.weight", [(source + "q_b_proj.weight", 0, query)])
        inside = self.te or latent.q_rank is None  # see specs.NormedColumnLinear
        norm = "linear_kv_up_proj.layer_norm_weight" if inside else "kv_layernorm.weight"
        yield self._whole(name + "linear_kv_down_proj.weight", source + "kv_a_proj_with_mqa.weight")
        yield self._whole(name + norm, source + "kv_a_layernorm.weight")
        up = heads * (latent.nope_dim + latent.v_dim)
        yield from self._shard(name + "linear_kv_up_proj.weight", [(source + "kv_b_proj.weight", 0, up)])
        yield from self._shard(
            name + "linear_proj.weight", [(source + "o_proj.weight", 0, heads * latent.v_dim)], dim=1
        )

    def _experts(self, local: str, hf: str) -> Iterator[Slice]:
        mixture, names = self._mixture, expert_names(self.arch, hf)
        yield self._whole(local + "router.weight", names.router)
        if mixture.expert_bias:
            yield self._whole(local + "router.expert_bias", names.bias)
        if mixture.shared_ffn:
            yield from self._gated(local + "shared_experts.", hf + "mlp.shared_experts.")
        each = mixture.experts // self.topology.expert
        for j in range(each):
            gate, up, down = names.projections(self.ep * each + j)
            if self.te:
                fc1, fc2 = (f"{local}experts.linear_fc{i}.weight{j}" for i in (1, 2))
            else:
                fc1, fc2 = (f"{local}experts.local_experts.{j}.linear_fc{i}.weight" for i in (1, 2))
            yield from self._gate_up(fc1, gate, up, self.topology.etp, self.etp)
            yield from self._shard(fc2, [(down, 0, mixture.ffn)], dim=1, parts=self.topology.etp, part=self.etp)

    def _gated(self, local: str, hf: str) -> Iterator[Slice]:
        gate, up, down = (f"{hf}{name}_proj.weight" for name in ("gate", "up", "down"))
        yield from self._gate_up(local + "linear_fc1.weight", gate, up, self.topology.tensor, self.tp)
        yield from self._shard(local + "linear_fc2.weight", [(down, 0, self.shapes[down][1])], dim=1)

    def _gate_up(self, param: str, gate: str, up: str, parts: int, part: int) -> Iterator[Slice]:
        """Each rank stacks its own share of the gate on its own share of the up projection."""
        rows = self.shapes[gate][0] // parts
        yield from self._stack(param, [(gate, part * rows, rows), (up, part * rows, rows)])

    def _vocabulary(self, param: str, tensor: str) -> Iterator[Slice]:
        """Rows beyond the vocabulary are padding: no slice covers them."""
        rows = padded_vocab(self.arch.vocab, self.topology.tensor) // self.topology.tensor
        first = self.tp * rows
        yield from self._stack(param, window([(tensor, 0, self.arch.vocab)], first, first + rows))

    def _shard(
        self, param: str, runs: list[Run], dim: int = 0, parts: int | None = None, part: int | None = None
    ) -> Iterator[Slice]:
        """The equal share of a stack that belongs to one (by default tensor-parallel) rank."""
        parts = self.topology.tensor if parts is None else parts
        part = self.tp if part is None else part
        size = sum(length for _, _, length in runs) // parts
        yield from self._stack(param, window(runs, part * size, (part + 1) * size), dim)

    def _stack(self, param: str, runs: list[Run], dim: int = 0) -> Iterator[Slice]:
        start = 0
        for tensor, first, length in runs:
            shape = self.shapes[tensor]
            yield Slice(
                tensor=tensor,
                offset=_at(shape, dim, first, 0),
                shape=_at(shape, dim, length, None),
                param=param,
                param_offset=_at(shape, dim, start, 0),
            )
            start += length

    def _whole(self, param: str, tensor: str) -> Slice:
        shape = self.shapes[tensor]
        zero = (0,) * len(shape)
        return Slice(tensor, zero, shape, param, zero)

    @property
    def _latent(self) -> Latent:
        assert self.arch.latent is not None
        return self.arch.latent

    @property
    def _mixture(self) -> Mixture:
        assert self.arch.mixture is not None
        return self.arch.mixture


@dataclass(frozen=True)
class ExpertNames:
    """HF's names inside one mixture layer; families differ here and nowhere else."""

    router: str
    bias: str
    expert: str  # with {} for the expert's number
    gate_up_down: tuple[str, str, str]

    def projections(self, expert: int) -> tuple[str, str, str]:
        """Names of the gate, up and down projections of one expert."""
        gate, up, down = (f"{self.expert.format(expert)}.{name}.weight" for name in self.gate_up_down)
        return gate, up, down


def expert_names(arch: Architecture, layer_prefix: str) -> ExpertNames:
    """The names of a mixture layer's tensors under `layer_prefix` ("model.layers.3.")."""
    block = layer_prefix + ("block_sparse_moe." if arch.family == "mixtral" else "mlp.")
    mixtral = arch.family == "mixtral"
    return ExpertNames(
        router=block + "gate.weight",
        bias=block + "gate.e_score_correction_bias",
        expert=block + "experts.{}",
        gate_up_down=("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"),
    )


def qkv_runs(arch: Architecture, q: str, k: str, v: str) -> list[Run]:
    """Megatron's fused QKV, query group by query group: the group's query heads, its key head, its value head."""
    heads, dim = arch.heads // arch.kv_heads, arch.head_dim
    runs: list[Run] = []
    for group in range(arch.kv_heads):
        runs += [(q, group * heads * dim, heads * dim), (k, group * dim, dim), (v, group * dim, dim)]
    return runs


def window(runs: list[Run], start: int, stop: int) -> list[Run]:
    """The runs that lie in rows [start, stop) of the stack, cut at its edges."""
    found, position = [], 0
    for tensor, first, length in runs:
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            found.append((tensor, first + low, high - low))
        position += length
    return found


def _at(shape: tuple[int, ...], dim: int, value: int, other: int | None) -> tuple[int, ...]:
    """`value` in dimension `dim`, elsewhere `other` (None: the tensor's own extent)."""
    return tuple(value if d == dim else extent if other is None else other for d, extent in enumerate(shape))


def _layer_shapes(arch: Architecture, layer: int) -> Shapes:
    hidden = arch.hidden
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= _latent_shapes(arch, arch.latent) if arch.latent else _attention_shapes(arch)
    if not arch.is_moe_layer(layer):
        return shapes | _gated_shapes("mlp.", hidden, arch.ffn)
    mixture = arch.mixture
    assert mixture is not None
    names = expert_names(arch, "")
    shapes[names.router] = (mixture.experts, hidden)
    if mixture.expert_bias:
        shapes[names.bias] = (mixture.experts,)
    if mixture.shared_ffn:
        shapes |= _gated_shapes("mlp.shared_experts.", hidden, mixture.shared_ffn)
    for expert in range(mixture.experts):
        gate, up, down = names.projections(expert)
        shapes[gate] = shapes[up] = (mixture.ffn, hidden)
        shapes[down] = (hidden, mixture.ffn)
    return shapes


def _mtp_shapes(arch: Architecture) -> Shapes:
    norms = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (arch.hidden,))
    return norms | {"eh_proj.weight": (arch.hidden, 2 * arch.hidden)}


def _gated_shapes(prefix: str, hidden: int, ffn: int) -> Shapes:
    return {
        prefix + "gate_proj.weight": (ffn, hidden),
        prefix + "up_proj.weight": (ffn, hidden),
        prefix + "down_proj.weight": (hidden, ffn),
    }


def _attention_shapes(arch: Architecture) -> Shapes:
    query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: Shapes = {}
    for letter, rows in (("q", query), ("k", key), ("v", key)):
        shapes[f"self_attn.{letter}_proj.weight"] = (rows, arch.hidden)
        if arch.qkv_bias:
            shapes[f"self_attn.{letter}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (arch.hidden, query)
    if arch.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (arch.head_dim,)
    return shapes


def _latent_shapes(arch: Architecture, latent: Latent) -> Shapes:
    query = arch.heads * (latent.nope_dim + latent.rope_dim)
    shapes: Shapes = {}
    if latent.q_rank is None:
        shapes["self_attn.q_proj.weight"] = (query, arch.hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (latent.q_rank, arch.hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (latent.q_rank,)
        shapes["self_attn.q_b_proj.weight"] = (query, latent.q_rank)
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = (latent.kv_rank + latent.rope_dim, arch.hidden)
    shapes["self_attn.kv_a_layernorm.weight"] = (latent.kv_rank,)
    shapes["self_attn.kv_b_proj.weight"] = (arch.heads * (latent.nope_dim + latent.v_dim), latent.kv_rank)
    shapes["self_attn.o_proj.weight"] = (arch.hidden, arch.heads * latent.v_dim)
    return shapes
