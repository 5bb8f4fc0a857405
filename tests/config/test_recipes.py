"""No recipe in the repository can fail to start for a reason of configuration: each composes, validates and fits its model."""

from pathlib import Path

import pytest

from megatron_dapo.config import ModelNumbers, check_model, configs_root, load_config
from megatron_dapo.config.compose import GROUPS, choices

QWEN2_5_7B = ModelNumbers(layers=28, heads=28, kv_heads=4, ffn=18944, max_positions=131072)
QWEN2_5_32B = ModelNumbers(layers=64, heads=40, kv_heads=8, ffn=27648, max_positions=131072)
QWEN3_30B = ModelNumbers(layers=48, heads=32, kv_heads=4, experts=128, topk=8, expert_ffn=768, max_positions=32768)
QWEN3_235B = ModelNumbers(layers=94, heads=64, kv_heads=4, experts=128, topk=8, expert_ffn=1536, max_positions=40960)
DEEPSEEK_V3 = ModelNumbers(
    layers=61, heads=128, kv_heads=128, ffn=18432, experts=256, topk=8, expert_ffn=2048, max_positions=163840
)
SMOLLM2 = ModelNumbers(layers=30, heads=9, kv_heads=3, ffn=1536, max_positions=8192)
DEMO = ModelNumbers(layers=4, heads=4, kv_heads=2, experts=8, topk=2, expert_ffn=128, max_positions=256)
MODELS = {
    "demo": DEMO,
    "smollm2_135m": SMOLLM2,
    "dapo_qwen2_5_32b": QWEN2_5_32B,
    "dapo_qwen2_5_32b_wo_ds": QWEN2_5_32B,
    "dapo_qwen2_5_32b_early": QWEN2_5_32B,
    "dapo_qwen2_5_7b_8gpu": QWEN2_5_7B,
    "dapo_qwen3_30b_a3b": QWEN3_30B,
    "dapo_qwen3_30b_a3b_8gpu": QWEN3_30B,
    "dapo_qwen3_235b_a22b": QWEN3_235B,
    "dapo_deepseek_v3": DEEPSEEK_V3,
}
SUPERVISED = {"demo_sft": DEMO}


def test_every_recipe_is_tested():
    assert set(choices("recipe")) == {*MODELS, *SUPERVISED}


@pytest.mark.parametrize("recipe", MODELS)
def test_training_recipe(recipe: str):
    config = load_config([], recipe, command="train")
    check_model(config, MODELS[recipe])
    parallel = config.parallel
    assert parallel.world_size is not None
    assert parallel.world_size % config.rollout.tensor_parallel_size == 0


@pytest.mark.parametrize("recipe", [*MODELS, *SUPERVISED])
def test_topology_of_the_recipe(recipe: str):
    """Every rank has its place, and the stages hold all layers."""
    from megatron_dapo.parallel.topology import Topology

    config, numbers = load_config([], recipe), {**MODELS, **SUPERVISED}[recipe]
    parallel = config.parallel
    topology = Topology(
        parallel.world_size, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context,
        parallel.expert, config.derived.expert_tensor, parallel.first_stage_layers, parallel.last_stage_layers,
    )  # fmt: skip
    sizes = ("layers", "heads", "kv_heads", "experts", "expert_ffn", "ffn")
    assert topology.problems(**{name: getattr(numbers, name) for name in sizes}) == []
    assert sum(len(stage.layers) for stage in topology.stages(numbers.layers)) == numbers.layers
    places = {(c.tp, c.cp, c.dp, c.pp) for c in topology.coordinates()}
    assert len(places) == parallel.world_size
    assert len({(c.etp, c.ep, c.edp, c.pp) for c in topology.coordinates()}) == parallel.world_size


@pytest.mark.parametrize("recipe", SUPERVISED)
def test_supervised_recipe(recipe: str):
    config = load_config(["model.path=m", "sft.train_files=rows.parquet"], recipe, command="sft")
    check_model(config, SUPERVISED[recipe])


@pytest.mark.parametrize("layout", ["single", "dp2", "ep2", "tp2", "pp2"])
def test_the_demo_runs_under_every_small_layout(layout: str):
    check_model(load_config([f"parallel={layout}"], "demo", command="train"), DEMO)


@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_algorithms(algorithm: str):
    sizes = ["data.max_response_length=8192", "actor.max_tokens_per_micro_batch=16384"]
    load_config([f"algorithm={algorithm}", "model=qwen2_5_7b", "data=dapo_math_17k", *sizes], command="train")


def test_published_runs_have_the_published_constants():
    """Reference: the three launch scripts of the DAPO recipe (32B on 16 x 8 GPUs)."""
    full, without, early = (load_config([], name) for name in list(MODELS)[2:5])
    for config in (full, without, early):
        actor, data, optim, val = config.actor, config.data, config.actor.optim, config.rollout.val_kwargs
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
        assert (data.max_prompt_length, data.max_response_length, data.truncation) == (2048, 20480, "left")
        assert (data.train_batch_size, actor.ppo_mini_batch_size, config.rollout.n) == (512, 32, 16)
        assert (optim.lr, optim.lr_warmup_steps, optim.weight_decay, optim.clip_grad) == (1e-6, 10, 0.1, 1.0)
        overlong = config.reward.overlong_buffer
        assert (overlong.enable, overlong.len, overlong.penalty_factor) == (True, 4096, 1.0)
        assert (actor.max_tokens_per_micro_batch, config.rollout.max_num_batched_tokens) == (22528, 22528)
        assert (val.temperature, val.top_p, val.do_sample) == (1.0, 0.7, True)
        assert (actor.entropy_coeff, actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (0.0, False, False)
        assert (config.trainer.test_freq, config.trainer.save_freq, config.trainer.total_epochs) == (5, 5, 1)
        assert (config.parallel.world_size, config.rollout.tensor_parallel_size) == (128, 8)
    rules = full.algorithm.filter_groups
    assert (rules.enable, rules.metric, rules.max_num_gen_batches, full.data.gen_batch_size) == (True, "acc", 10, 1536)
    assert [c.algorithm.filter_groups.enable for c in (without, early)] == [False, False]
    assert [c.actor.loss_agg_mode for c in (full, without, early)] == ["token-mean"] * 2 + ["seq-mean-token-mean"]
    assert [c.rollout.gpu_memory_utilization for c in (full, without, early)] == [0.8, 0.7, 0.8]


def test_every_yaml_says_what_it_is():
    for path in [p for group in GROUPS for p in (configs_root() / group).glob("*.yaml")]:
        assert "#" in path.read_text().partition(":")[0] or path.stem == "single", path


def test_configs_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(configs_root()).is_absolute() and load_config([], "demo").rollout.n == 8
