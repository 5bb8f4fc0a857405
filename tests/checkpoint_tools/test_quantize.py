"""Float8 weights mean what a plain loop over blocks says, and a quantized checkpoint comes back close and loadable."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_tools import quantize as module
from checkpoint_tools.inspection import inspect_checkpoint
from checkpoint_tools.quantize import BLOCK, FLOAT8, SCALE, dequantize, from_float8, quantize, to_float8
from megatron_dapo.cli.main import main
from megatron_dapo.models.hf_files import HFWeights, WeightsError
from tests.models.hf_models import saved


def test_every_block_has_its_own_scale():
    weight = torch.randn(2 * BLOCK + 5, BLOCK + 7, generator=torch.Generator().manual_seed(0))
    weight[:BLOCK] *= 1000
    values, scale = to_float8(weight)
    assert values.dtype == FLOAT8 and scale.shape == (3, 2)
    back = from_float8(values, scale)
    for i in range(3):
        for j in range(2):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            assert torch.equal(back[block], values[block].float() * scale[i, j])
            assert (back[block] - weight[block]).abs().max() <= weight[block].abs().max() / 16  # three bits of mantissa
    again, same = to_float8(back)
    assert torch.equal(again.float(), values.float()) and torch.allclose(same, scale)


def test_there_and_back(tmp_path):
    seen = []
    quantize(saved("deepseek_v3"), tmp_path / "float8", progress=lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2]
    assert json.loads((tmp_path / "float8" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    kinds = {info.name: info.dtype for info in inspect_checkpoint(tmp_path / "float8")}
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight"] == "float8_e4m3fn"
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight" + SCALE] == "float32"
    assert kinds["model.layers.1.mlp.gate.weight"] == kinds["model.embed_tokens.weight"] == "float32"
    with HFWeights(tmp_path / "float8") as weights, pytest.raises(WeightsError, match="convert dequantize"):
        weights.dtype("model.layers.0.mlp.up_proj.weight")
    dequantize(tmp_path / "float8", tmp_path / "plain", dtype=torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    before, after = (load_file(path / "model.safetensors") for path in (saved("deepseek_v3"), tmp_path / "plain"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert (after[name] - tensor).abs().max() <= tensor.abs().max() / 16, name
    assert torch.equal(before["model.layers.1.mlp.gate.weight"], after["model.layers.1.mlp.gate.weight"])
    with pytest.raises(WeightsError, match="has no float8 weights"):
        dequantize(saved("deepseek_v3"), tmp_path / "again")


def test_an_interrupted_conversion_goes_on(tmp_path, monkeypatch):
    """Finished files are kept, the half-written one is not, and nothing looks complete meanwhile."""
    write, files = module._write_file, []

    def stop_after_two(path, entries):
        if len(files) == 2:
            path.with_name(path.name + ".part").write_bytes(b"half")
            raise KeyboardInterrupt
        files.append(path.name)
        write(path, entries)

    monkeypatch.setattr(module, "_write_file", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        quantize(saved("deepseek_v3"), tmp_path / "float8", file_bytes=40_000)
    assert not (tmp_path / "float8").exists()
    again = []
    monkeypatch.setattr(module, "_write_file", lambda path, rest: (again.append(path.name), write(path, rest)))
    quantize(saved("deepseek_v3"), tmp_path / "float8", file_bytes=40_000)
    assert again and not set(again) & set(files)
    quantize(saved("deepseek_v3"), tmp_path / "whole")
    left = sorted(file.name for file in (tmp_path / "float8").iterdir() if file.suffix in (".part", ".json"))
    assert left == ["config.json", "generation_config.json", "model.safetensors.index.json"]
    kinds = {info.name: (info.dtype, info.shape) for info in inspect_checkpoint(tmp_path / "whole")}
    assert kinds == {info.name: (info.dtype, info.shape) for info in inspect_checkpoint(tmp_path / "float8")}


@pytest.mark.parametrize("action", ["dequantize", "quantize", "gguf", "smollm2"])
def test_only_one_rank_of_a_launcher_works(action: str, tmp_path, monkeypatch):
    """The others leave before they join anything: they would write into the same hidden directory."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    paths = [str(tmp_path / "out")] if action == "smollm2" else [str(saved("deepseek_v3")), str(tmp_path / "out")]
    assert main(["convert", action, *paths]) == 0
    assert list(tmp_path.iterdir()) == []
