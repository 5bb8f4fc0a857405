"""A checkpoint loaded into any layout and exported from it is bit-identical to what was loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.hf_models import saved


def _load_and_export(hf_dir, parallel, out):
    import torch.distributed as dist

    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.export import export_hf
    from megatron_dapo.models.load import load_hf
    from megatron_dapo.models.megatron_config import topology_of, transformer_config
    from megatron_dapo.parallel.groups import init_distributed

    arch, sizes = Architecture.from_dir(hf_dir), ParallelConfig(**parallel)
    topology = topology_of(sizes, dist.get_world_size())
    init_distributed(topology, seed=1)
    chunks = build_model(arch, transformer_config(arch, ModelConfig(dtype="float32"), sizes))
    load_hf(chunks, arch, topology, hf_dir)
    export_hf(chunks, arch, topology, out, source_dir=hf_dir, file_bytes=60_000)


CASES = [
    (4, "qwen2", dict(tensor=2, pipeline=2)),
    (4, "llama_kv1", dict(tensor=4)),
    (4, "mixtral", dict(expert=4)),
    (2, "deepseek_v3", dict(pipeline=2, virtual_pipeline=2)),
    (8, "qwen3_moe", dict(tensor=2, pipeline=2, virtual_pipeline=2, expert=2)),
]


@pytest.mark.parametrize(("world", "name", "parallel"), CASES, ids=[f"{c[0]} ranks, {c[1]}" for c in CASES])
def test_round_trip(ranks, tmp_path, world, name, parallel):
    ranks.run(_load_and_export, world, str(saved(name)), parallel, str(tmp_path / "out"))
    before = load_file(Path(saved(name)) / "model.safetensors")
    after = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
