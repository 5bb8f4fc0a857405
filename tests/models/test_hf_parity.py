"""On one rank a loaded Megatron model computes what transformers computes, packed or not, and exports what it loaded."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dapo.config.model import ModelConfig, ParallelConfig
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.build import build_model
from megatron_dapo.models.export import export_hf
from megatron_dapo.models.hf_files import WeightsError
from megatron_dapo.models.load import load_hf
from megatron_dapo.models.megatron_config import transformer_config
from megatron_dapo.models.storage import storages
from tests.models.hf_models import CONFIGS, saved, saved_with_mtp

LENGTHS = (3, 17, 40, 9, 1, 9, 30)


def build(path, **model):
    arch = Architecture.from_dir(path)
    config = transformer_config(arch, ModelConfig(path=str(path), **({"dtype": "float32"} | model)), ParallelConfig())
    return arch, build_model(arch, config)


def packed_params(lengths):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(one_rank, name):
    path = saved(name)
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(0, arch.vocab, (2, 40))
    ours = chunks[0](ids, None, None)[..., : arch.vocab]
    torch.testing.assert_close(ours, reference(ids).logits, atol=1e-5, rtol=0)

    pack = torch.randint(0, arch.vocab, (1, sum(LENGTHS)))
    ours = chunks[0](pack, None, None, packed_seq_params=packed_params(LENGTHS))[0, :, : arch.vocab]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    alone = torch.cat([reference(pack[:, a:b]).logits[0] for a, b in pairwise(bounds)])
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_export_is_bit_identical(one_rank, name, tmp_path):
    path = saved(name)
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    export_hf(chunks, arch, one_rank, tmp_path / "out", source_dir=path, file_bytes=40_000)
    assert not list(tmp_path.glob(".*")), "no half-written directory is left"
    before = load_file(path / "model.safetensors")
    after = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20)[None]
    first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(again(ids).logits, first(ids).logits)


def test_export_keeps_the_layers_that_are_not_trained(one_rank, tmp_path):
    path = saved_with_mtp("deepseek_v3")
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    export_hf(chunks, arch, one_rank, tmp_path / "out", source_dir=path)
    before = load_file(path / "model.safetensors")
    after = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    assert set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before)


def test_export_replaces_and_casts(one_rank, tmp_path):
    path = saved("deepseek_v3")
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    for dtype in (torch.float32, torch.bfloat16):
        export_hf(chunks, arch, one_rank, tmp_path / "out", source_dir=path, dtype=dtype)
    after = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {t.dtype for key, t in after.items() if "correction_bias" not in key}
    assert kinds == {torch.bfloat16}
    assert after["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert '"dtype": "bfloat16"' in (tmp_path / "out" / "config.json").read_text()


def test_bfloat16_model_is_close(one_rank):
    path = saved("qwen3_moe")
    arch, chunks = build(path, dtype="bfloat16")
    load_hf(chunks, arch, one_rank, path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.randint(0, arch.vocab, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (chunks[0](ids, None, None)[..., : arch.vocab] - reference(ids).logits).float().abs()
    assert difference.median() < 0.02


def test_padding_rows_are_zero_and_experts_are_marked(one_rank):
    path = saved("qwen3_moe")
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    assert not storages(chunks)["0.output_layer.weight"][arch.vocab :].any()
    marks = {name: getattr(p, "allreduce", True) for name, p in chunks[0].named_parameters()}
    assert all(mark == (".experts." not in name) for name, mark in marks.items())


def test_value_head_keeps_zero_unless_the_checkpoint_has_one(one_rank, tmp_path):
    path = saved("qwen2")
    arch = Architecture.from_dir(path)
    config = transformer_config(arch, ModelConfig(path=str(path), dtype="float32"), ParallelConfig())
    critic = build_model(arch, config, value_head=True)
    load_hf(critic, arch, one_rank, path, value_head=True)
    ids = torch.arange(12)[None]
    assert critic[0](ids, None, None).shape == (1, 12, 1)
    assert not critic[0](ids, None, None).any()
    with torch.no_grad():
        critic[0].output_layer.weight.normal_()
    export_hf(critic, arch, one_rank, tmp_path / "critic", source_dir=path, value_head=True)
    again = build_model(arch, config, value_head=True)
    load_hf(again, arch, one_rank, tmp_path / "critic", value_head=True)
    assert torch.equal(again[0](ids, None, None), critic[0](ids, None, None))


def damaged(tmp_path, change):
    """A copy of the tiny Qwen2 whose tensors `change` alters."""
    path = saved("qwen2")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), r"has no tensor model\.layers\.2\.mlp\.up_proj\.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"model\.norm\.weight .* has shape \(31,\).* implies \(32,\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}), "dtype F8_E4M3"),
    ],
)
def test_wrong_weights_are_named(one_rank, tmp_path, change, message):
    path = damaged(tmp_path, change)
    arch, chunks = build(path)
    with pytest.raises(WeightsError, match=message):
        load_hf(chunks, arch, one_rank, path)


def test_missing_and_broken_files_are_named(one_rank, tmp_path):
    path = damaged(tmp_path, lambda tensors: None)
    arch, chunks = build(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a complete safetensors file"):
        load_hf(chunks, arch, one_rank, path)
    file.unlink()
    with pytest.raises(WeightsError, match="has no weights"):
        load_hf(chunks, arch, one_rank, path)
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "model-00001.safetensors"}}'
    )
    with pytest.raises(WeightsError, match=r"names model-00001\.safetensors, which is missing"):
        load_hf(chunks, arch, one_rank, path)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_deferred_head_gives_the_logits_later(one_rank, name):
    from megatron_dapo.models.heads import head_weight

    path = saved(name)
    arch, chunks = build(path)
    load_hf(chunks, arch, one_rank, path)
    deferred = build_model(arch, chunks[0].config, deferred_head=True)
    load_hf(deferred, arch, one_rank, path)
    ids = torch.arange(30)[None]
    hidden = deferred[0](ids, None, None)
    assert hidden.shape == (1, 30, arch.hidden)
    torch.testing.assert_close(hidden @ head_weight(deferred[0]).t(), chunks[0](ids, None, None), atol=1e-5, rtol=0)
    assert set(dict(deferred[0].named_parameters())) == set(dict(chunks[0].named_parameters()))
    assert set(deferred[0].sharded_state_dict()) == set(chunks[0].sharded_state_dict())
