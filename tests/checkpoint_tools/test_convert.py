"""Hugging Face → Megatron → Hugging Face is bit-identical for every family, and Megatron itself loads what is written."""

import json
import math
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from benchmarks.conversion import Peak
from checkpoint_tools import convert
from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoint_tools.inspection import inspect_checkpoint
from checkpoint_tools.unfinished import STATE
from checkpoint_tools.verify import compare, compare_logits
from megatron_dapo.cli.main import main
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.hf_files import WeightsError
from megatron_dapo.models.tables import hf_shapes
from megatron_dapo.parallel.groups import destroy
from tests.models.hf_models import BASE, CONFIGS, saved, saved_with_mtp


@pytest.fixture(scope="module", autouse=True)
def world():
    yield
    destroy()


def tensors(path):
    return {key: t for file in path.glob("*.safetensors") for key, t in load_file(file).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    hf_to_megatron(saved(name), tmp_path / "megatron", part_bytes=80_000)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", hf_dir=saved(name), file_bytes=50_000)
    before, after = tensors(saved(name)), tensors(tmp_path / "hf")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert compare_logits(saved(name), tmp_path / "hf", [[1, 2, 3]]) == 0
    assert not list(tmp_path.glob(".*"))


def test_layers_that_predict_further_tokens_go_there_and_back(tmp_path, capsys):
    source = saved_with_mtp("deepseek_v3")
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", hf_dir=source, file_bytes=50_000)
    before, after = tensors(source), tensors(tmp_path / "hf")
    assert "model.layers.4.eh_proj.weight" in before and set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert main(["verify", str(source), str(tmp_path / "megatron"), "--logits", "1"]) == 0
    before["model.layers.4.embed_tokens.weight"][3] += 1
    shutil.copytree(source, tmp_path / "other")
    save_file(before, tmp_path / "other" / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"layers\.4\.embed_tokens\.weight is not equal to model\.embed_tokens\.weight"
    ):
        hf_to_megatron(tmp_path / "other", tmp_path / "megatron2")


def test_dtype_is_kept_or_cast(tmp_path):
    hf_to_megatron(saved("deepseek_v3"), tmp_path / "megatron", dtype=torch.bfloat16, threads=1)
    kinds = {info.dtype for info in inspect_checkpoint(tmp_path / "megatron") if "expert_bias" not in info.name}
    assert kinds == {"bfloat16"}
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", hf_dir=saved("deepseek_v3"))
    assert {t.dtype for key, t in tensors(tmp_path / "hf").items() if "correction" not in key} == {torch.bfloat16}


def test_compare_finds_what_differs(tmp_path):
    hf_to_megatron(saved("qwen2"), tmp_path / "megatron")
    found = list(compare(saved("qwen2"), tmp_path / "megatron"))
    assert len(found) == len(tensors(saved("qwen2"))) and all(d.largest == 0 for d in found)
    other = {d.name: d for d in compare(saved("qwen2"), saved("llama"))}
    assert other["model.norm.weight"].largest > 0
    assert other["model.layers.0.self_attn.q_proj.bias"].shape_b is None
    with pytest.raises(WeightsError, match=r"config\.json"):
        list(compare(tmp_path / "megatron", tmp_path / "megatron"))


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_megatron_computes_what_transformers_computes(name, tmp_path, capsys):
    hf_to_megatron(saved(name), tmp_path / "megatron")
    assert compare_logits(saved(name), tmp_path / "megatron", [[1, 2, 3], list(range(40))]) < 1e-5
    assert main(["verify", str(saved(name)), str(tmp_path / "megatron"), "--logits", "2"]) == 0
    assert "0 differ" in (shown := capsys.readouterr().out) and "2 prompts; largest difference of a logit" in shown


def test_inspect_both_kinds(tmp_path):
    hf_to_megatron(saved("qwen3_moe"), tmp_path / "megatron")
    hf, megatron = inspect_checkpoint(saved("qwen3_moe")), inspect_checkpoint(tmp_path / "megatron")
    assert {i.name: i.shape for i in hf}["model.norm.weight"] == (32,)
    experts = next(i for i in megatron if i.name.endswith("layers.0.mlp.experts.experts.linear_fc2.weight"))
    assert experts.shape == (8, 32, 16) and experts.pieces == 8
    with pytest.raises(WeightsError):
        inspect_checkpoint(tmp_path / "nothing")


def test_an_interrupted_conversion_leaves_nothing_and_goes_on(tmp_path, monkeypatch):
    hf_to_megatron(saved("qwen2"), tmp_path / "megatron")
    write, files = convert._write_file, []

    def stop_after_two(path, *rest):
        if len(files) == 2:
            raise KeyboardInterrupt
        files.append(path.name)
        write(path, *rest)

    target = dict(hf_dir=saved("qwen2"), file_bytes=40_000)
    monkeypatch.setattr(convert, "_write_file", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", **target)
    assert not (tmp_path / "hf").exists()
    again = []
    monkeypatch.setattr(convert, "_write_file", lambda path, *rest: (again.append(path.name), write(path, *rest)))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", **target)
    assert again and not set(again) & set(files)
    assert not (tmp_path / "hf" / STATE).exists()
    assert all(torch.equal(t, tensors(tmp_path / "hf")[key]) for key, t in tensors(saved("qwen2")).items())


def test_an_interrupted_conversion_to_megatron_goes_on(tmp_path):
    def convert_until(stop):
        seen = []

        def progress(*step):
            seen.append(step)
            if len(seen) == stop:
                raise KeyboardInterrupt

        hf_to_megatron(saved("qwen3_moe"), tmp_path / "megatron", part_bytes=30_000, threads=1, progress=progress)
        return seen

    with pytest.raises(BaseException, match=r"KeyboardInterrupt|^$"):
        convert_until(stop=60)
    assert not (tmp_path / "megatron").exists()
    rest = convert_until(stop=None)
    assert rest[-1][1] == rest[-1][2] and 0 < len(rest) < rest[-1][2] - 20, "finished parts are kept"
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", hf_dir=saved("qwen3_moe"))
    before, after = tensors(saved("qwen3_moe")), tensors(tmp_path / "hf")
    assert set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before)


def test_progress_is_told(tmp_path):
    seen = []
    hf_to_megatron(saved("llama"), tmp_path / "megatron", threads=1, progress=lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] == len(seen)


def test_incomplete_and_foreign_checkpoints_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"no metadata\.json"):
        megatron_to_hf(tmp_path, tmp_path / "hf", hf_dir=saved("qwen2"))
    hf_to_megatron(saved("llama"), tmp_path / "megatron")
    with pytest.raises(WeightsError, match="belongs to another network"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", hf_dir=saved("qwen3"))


def damaged(name, tmp_path, change):
    """A copy of a tiny model in two files, with something wrong; `change(directory, tensors)` edits either."""
    directory = tmp_path / "damaged"
    shutil.copytree(saved(name), directory)
    values = tensors(directory)
    (directory / "model.safetensors").unlink()
    names = sorted(values)
    change(directory, values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: values[n] for n in part}, directory / file)
    weight_map = {n: file for file, part in files.items() for n in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, lambda d: (d / "b.safetensors").unlink(), "names b.safetensors, which is missing"),
        (None, lambda d: os.truncate(d / "b.safetensors", 500), "b.safetensors is not a complete safetensors file"),
        (lambda d, t: t.update({NORM: torch.zeros(31)}), None, f"{NORM} in .* has shape (31,), but config.json"),
        (lambda d, t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}), None, f"{NORM} in .* has dtype F8_E4M3"),
        (lambda d, t: edit_config(d, num_experts=4), None, "gate.weight in .* has shape (8, 32), but config.json"),
        (lambda d, t: edit_config(d, num_experts=16), None, "gate.weight in .* has shape (8, 32), but config.json"),
    ],
    ids=["missing shard", "truncated", "wrong shape", "dtype without a cast", "fewer experts", "more experts"],
)
def test_wrong_weights_end_in_one_clear_message(tmp_path, capsys, before, after, message):
    directory = damaged("qwen3_moe", tmp_path, before or (lambda d, t: None))
    if after is not None:
        after(directory)
    assert main(["convert", "to-megatron", str(directory), str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert re.search(".*".join(map(re.escape, message.split(" .* "))), shown) and "Traceback" not in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, like: next(d.rglob("*.distcp")).unlink(), "is missing or cut off"),
        (lambda d, like: [os.truncate(f, 900) for f in d.rglob("*.distcp")], "is missing or cut off"),
        (lambda d, like: edit_config(like, num_experts=4), "belongs to another network"),
    ],
    ids=["missing file", "truncated file", "expert count"],
)
def test_a_damaged_megatron_checkpoint_ends_in_one_clear_message(tmp_path, capsys, damage, message):
    shutil.copytree(saved("qwen3_moe"), tmp_path / "like")
    hf_to_megatron(saved("qwen3_moe"), tmp_path / "megatron")
    damage(tmp_path / "megatron", tmp_path / "like")
    words = ["to-hf", str(tmp_path / "megatron"), str(tmp_path / "out"), "--like", str(tmp_path / "like")]
    assert main(["convert", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown
    assert not (tmp_path / "out").exists()


def _peaks(source, target, small):
    """Bytes allocated at the peak of either direction, in a process that has only converted something small before."""
    hf_to_megatron(small, f"{target}/small")
    megatron_to_hf(f"{target}/small", f"{target}/small_hf", hf_dir=small)
    with Peak() as there:
        hf_to_megatron(source, f"{target}/megatron")
    with Peak() as back:
        megatron_to_hf(f"{target}/megatron", f"{target}/hf", hf_dir=source, file_bytes=60 << 20)
    return there.bytes, back.bytes


def test_memory_is_that_of_two_layers_at_most(ranks, tmp_path):
    """Six layers of 23 MiB; what does not depend on the model (plans, threads) may take a little beside."""
    config = LlamaConfig(
        **(BASE | dict(hidden_size=512, intermediate_size=3072, num_hidden_layers=6, num_key_value_heads=8))
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "hf")
    shapes = hf_shapes(Architecture.from_dir(tmp_path / "hf"))
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "hf" / "model.safetensors")
    layer = 4 * sum(math.prod(shape) for name, shape in shapes.items() if ".layers.0." in name)
    there, back = ranks.run(_peaks, 1, str(tmp_path / "hf"), str(tmp_path / "out"), str(saved("llama")))[0]
    limit = 2 * layer + (4 << 20)
    assert 0 < there <= limit and 0 < back <= limit, (there / layer, back / layer)


def _load_and_compare(hf_dir, checkpoint, parallel):
    """On every rank: a model filled by Megatron's own loader equals one filled from the Hugging Face files."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    from checkpoint_tools.megatron_files import hf_architecture
    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.hf_files import HFWeights
    from megatron_dapo.models.load import load_hf
    from megatron_dapo.models.megatron_config import topology_of, transformer_config
    from megatron_dapo.models.storage import storages
    from megatron_dapo.parallel.groups import init_distributed

    with HFWeights(hf_dir) as weights:
        arch, sizes = hf_architecture(hf_dir, weights), ParallelConfig(**parallel)
    topology = topology_of(sizes, dist.get_world_size())
    init_distributed(topology, seed=1)
    config = transformer_config(arch, ModelConfig(dtype="float32"), sizes)
    ours, theirs = build_model(arch, config), build_model(arch, config)
    load_hf(theirs, arch, topology, hf_dir)
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    names = [f"model{i}" for i in range(len(ours))]
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, ours, strict=True)}
    loaded = dist_checkpointing.load(state, checkpoint)
    for name, chunk in zip(names, ours, strict=True):
        chunk.load_state_dict(loaded[name])
    mine = storages(ours)
    return [name for name, t in storages(theirs).items() if not torch.equal(t, mine[name])]


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("qwen3_moe", dict(tensor=2, pipeline=2)),
        ("qwen2", dict(tensor=2, pipeline=2, virtual_pipeline=2)),
        ("deepseek_v3", dict(tensor=2, pipeline=2, expert=2, expert_tensor=1)),
    ],
)
def test_megatron_loads_it_in_another_layout(ranks, tmp_path, name, parallel):
    """DeepSeek-V3 with a layer that predicts further tokens, which lies with the last pipeline stage."""
    source = saved_with_mtp(name) if name == "deepseek_v3" else saved(name)
    hf_to_megatron(source, tmp_path / "megatron", part_bytes=100_000)
    assert ranks.run(_load_and_compare, 4, str(source), str(tmp_path / "megatron"), parallel) == [[]] * 4
