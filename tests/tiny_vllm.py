"""Tiny random models and one shared vLLM engine for each, for every test that needs a real engine."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.resharding.layouts import extents, index_in_storage
from megatron_dapo.resharding.transport_shm import WeightPublisher, weight_update
from megatron_dapo.rollout import EngineSpec, Generation, GenerationRequest, RolloutEngine, Sampling, sample_seed

PROMPT_LENGTH = 40  # longer than one block of the prefix cache


BASE = {
    "vocab_size": 515,  # neither a multiple of 64 nor even
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "hidden_size": 64}
MODELS = {
    # the expert width is no multiple of 32: vLLM's CPU kernel pads it
    "moe": ("qwen3_moe", EXPERTS | {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
    "deepseek": (
        "deepseek_v3",
        EXPERTS
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
}


def write_model(kind: str, directory: str) -> None:
    """Random weights of a tiny model, in float32, as a Hugging Face directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    family, own = MODELS[kind]
    config = AutoConfig.for_model(family, **(BASE | own))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    if kind == "qwen2":  # the one with a tokenizer: token 7 reads " w7"
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({f" w{i}": i for i in range(BASE["vocab_size"])}, unk_token=" w0"))
        words.pre_tokenizer, words.decoder = pre_tokenizers.Split(" ", "merged_with_next"), decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=" w1", pad_token=" w0").save_pretrained(directory)


@cache
def scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix="tiny-vllm-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def model_directory(kind: str) -> str:
    directory = scratch() / kind
    write_model(kind, str(directory))
    return str(directory)


def spec(kind: str, **changes: object) -> EngineSpec:
    return EngineSpec(model_directory(kind), max_model_len=256, kv_cache_gb=0.125, max_num_seqs=64, **changes)


@cache
def engine(kind: str, tensor_parallel_size: int = 1) -> RolloutEngine:
    """The engine of this model that all tests of this session share. Its weights are whatever was pushed last."""
    size, name = tensor_parallel_size, f"{kind}-tp{tensor_parallel_size}"
    started = RolloutEngine.start(spec(kind, tensor_parallel_size=size, routed_experts=kind == "moe", name=name))
    atexit.register(started.close)
    started.wait_ready(300)
    return started


def weights(kind: str) -> dict[str, Tensor]:
    return load_file(f"{model_directory(kind)}/model.safetensors")


def changed(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other weights of the same scale, so that a stale one anywhere shows in the log-probs."""
    g = torch.Generator().manual_seed(seed)
    return {name: t + 0.3 * t.std().clamp_min(0.05) * torch.randn(t.shape, generator=g) for name, t in tensors.items()}


def whole(tensors: dict[str, Tensor]) -> tuple[Slice, ...]:
    """The layout of a holder that stores every tensor in full, under its own name."""
    return tuple(Slice(n, (0,) * t.ndim, tuple(t.shape), n, (0,) * t.ndim) for n, t in tensors.items())


def hold(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The storages of a holder with this layout, filled from whole tensors; padding is NaN and must never travel."""
    storages = {name: torch.full(shape, torch.nan) for name, shape in extents(layout).items()}
    for piece in layout:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        place = index_in_storage(piece, piece.offset, piece.shape)
        storages[piece.param][place] = tensors[piece.tensor][box].view(storages[piece.param][place].shape)
    return storages


def push(
    engine: RolloutEngine, tensors: dict[str, Tensor], version: int, sources: Mapping[int, Layout] | None = None
) -> list[dict]:
    """Push from these source ranks, all played by this process; by default one holder of everything."""
    sources = sources or {0: whole(tensors)}
    destinations = dict(enumerate(engine.layouts()))
    prefix = f"/dev/shm/tiny-vllm-{os.getpid()}"
    publishers = []
    for rank, layout in sources.items():
        held = hold(layout, tensors)
        args = (rank, layout, held.__getitem__, sources, destinations, prefix)
        publishers.append(WeightPublisher(*args, dtypes=engine.dtypes()))
    receipts = [receipt for publisher in publishers for receipt in publisher.write()]
    report = engine.update_weights(weight_update(receipts), version)
    for publisher in publishers:
        publisher.close()
    return report


def requests(
    prompts: int = 4, samples: int = 2, step: int = 0, sampling: Sampling | None = None
) -> list[GenerationRequest]:
    sampling = sampling or Sampling(max_tokens=12, ignore_eos=True)
    made = []
    for p in range(prompts):
        ids = torch.randint(3, 500, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(p)).tolist()
        for s in range(samples):
            made.append(GenerationRequest(f"{step}-{p}-{s}", tuple(ids), sample_seed(7, step, f"0-{p}-0", s), sampling))
    return made


def save(kind: str, tensors: dict[str, Tensor]) -> str:
    """A Hugging Face directory with these weights; the last one saved of its kind."""
    directory = scratch() / f"{kind}-saved"
    directory.mkdir(exist_ok=True)
    shutil.copy(f"{model_directory(kind)}/config.json", directory)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return str(directory)


def reference(kind: str, tensors: dict[str, Tensor]) -> torch.nn.Module:
    """The same weights in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(save(kind, tensors), dtype=torch.float32).eval()


@torch.no_grad()
def worst_difference(
    model: torch.nn.Module, asked: list[GenerationRequest], got: list[Generation], temperature: float = 1.0
) -> float:
    """Largest |log-prob of vLLM - log-prob of transformers| over all sampled tokens."""
    worst = 0.0
    for request, sample in zip(asked, got, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(sample.logprobs)).abs().max().item())
    return worst
