"""Whatever is wrong with a run's inputs ends it before any engine starts, with one message that names it and a way out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.trainers import bringup


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    made = Demo(tmp_path_factory.mktemp("inputs"))
    write_inputs(made)
    return made


@pytest.fixture
def model(demo: Demo, tmp_path: Path) -> Path:
    """A copy of the model directory, to be damaged."""
    return Path(shutil.copytree(demo.init, tmp_path / "model"))


def overrides(demo: Demo, *more: str) -> list[str]:
    return [
        "recipe=demo",
        "parallel.world_size=1",
        "parallel.expert=1",
        f"model.path={demo.init}",
        f"data.train_files=[{demo.data}/train.parquet]",
        f"data.val_files=[{demo.data}/val.parquet]",
        *more,
    ]


def bring_up(words: list[str]) -> None:
    config = load_config(words, command="train")
    bringup.topology_of(config)
    bringup.checked_architecture(config)
    bringup.read_inputs(config)


def refuses(words: list[str], *texts: str) -> None:
    with pytest.raises(UserError) as caught:
        bring_up(words)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_good_input_comes_up(demo):
    bring_up(overrides(demo))


def test_missing_file(demo, tmp_path):
    refuses(overrides(demo, f"data.train_files=[{tmp_path}/none.parquet]"), "none.parquet")


def test_corrupt_parquet(demo, tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is no parquet")
    refuses(overrides(demo, f"data.train_files=[{tmp_path}/bad.parquet]"), "bad.parquet")


def test_wrong_schema(demo, tmp_path):
    pa.parquet.write_table(pa.table({"question": ["1+1"]}), tmp_path / "other.parquet")
    refuses(overrides(demo, f"data.train_files=[{tmp_path}/other.parquet]"), "other.parquet", "question")


def test_long_prompts_are_refused_dropped_or_cut(demo):
    refuses(overrides(demo, "data.max_prompt_length=4"), "max_prompt_length=4", "truncation")
    refuses(overrides(demo, "data.max_prompt_length=4", "data.truncation=drop"), "no prompt is left")
    for policy in ("left", "right", "middle"):
        bring_up(overrides(demo, "data.max_prompt_length=4", f"data.truncation={policy}"))


def test_model_directory_without_weights(demo, model):
    (model / "model.safetensors").unlink()
    refuses(overrides(demo, f"model.path={model}"), str(model), "no weights")


def test_missing_shard(demo, model):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(overrides(demo, f"model.path={model}"), "model-00001-of-00002.safetensors", "missing")


def test_truncated_weights(demo, model):
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    refuses(overrides(demo, f"model.path={model}"), "model.safetensors")


def test_unsupported_architecture(demo, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    refuses(overrides(demo, f"model.path={model}"), "MambaForCausalLM", "Qwen3MoeForCausalLM")


def test_tokenizer_without_chat_template(demo, model):
    (model / "chat_template.jinja").unlink()
    refuses(overrides(demo, f"model.path={model}"), "chat template")


def test_layouts_that_do_not_fit(demo, monkeypatch):
    refuses(overrides(demo, "parallel.world_size=3", "parallel.tensor=2"), "parallel.world_size", "3")
    monkeypatch.setenv("WORLD_SIZE", "3")
    refuses(overrides(demo, "parallel.world_size=3", "parallel.expert=3"), "parallel.expert", "8")


def test_both_layouts_are_checked_at_once(demo):
    words = overrides(demo, "parallel.world_size=1", "parallel.tensor=1", "rollout.tensor_parallel_size=3")
    refuses(words, "rollout.tensor_parallel_size", "the 4 attention heads", "the expert width 128")


def test_batches_that_do_not_divide(demo):
    refuses(overrides(demo, "data.train_batch_size=10", "actor.ppo_mini_batch_size=4"), "train_batch_size", "10", "4")


def test_all_problems_come_at_once(demo):
    refuses(
        overrides(demo, "rollout.temprature=1", "actor.clip_ratio_c=0.5", "data.train_batch_size=10"),
        "rollout.temprature",
        "rollout.temperature",
        "actor.clip_ratio_c",
    )


@pytest.mark.slow
def test_a_user_sees_one_paragraph_and_a_code(demo, tmp_path):
    words = overrides(demo, f"data.train_files=[{tmp_path}/none.parquet]", f"trainer.default_local_dir={tmp_path}/run")
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert done.stderr.count("none.parquet") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
