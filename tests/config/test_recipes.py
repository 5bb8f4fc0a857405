"""No recipe can fail to start for a reason of configuration: each composes, validates, fits its model and is built."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dapo.config import check_model, configs_root, load_config
from megatron_dapo.config.compose import GROUPS, choices
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import megatron_slices
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.networks import network
from megatron_dapo.planner.parameters import rank_parameters
from megatron_dapo.trainers.bringup import model_numbers, topology_of

SUPERVISED = ("demo_sft",)
TRAINING = tuple(name for name in choices("recipe") if name not in SUPERVISED)
PUBLISHED = ("dapo_qwen2_5_32b", "dapo_qwen2_5_32b_wo_ds", "dapo_qwen2_5_32b_early")


def architecture(recipe: str) -> Architecture:
    return network("demo" if recipe in SUPERVISED else load_config([], recipe).model.path)


@pytest.mark.parametrize("recipe", TRAINING)
def test_training_recipe(recipe: str):
    config = load_config([], recipe, command="train")
    check_model(config, model_numbers(architecture(recipe)))
    parallel = config.parallel
    assert parallel.world_size is not None
    assert parallel.world_size % config.rollout.tensor_parallel_size == 0


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Topology, int], None]]:
    """Be one rank of a world of any size whose other ranks do not exist, with all of Megatron's process groups."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dapo.parallel.groups import destroy, init_distributed

    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **options: new_group(ranks, backend="fake"))

    def join(topology: Topology, rank: int) -> None:
        destroy()
        dist.init_process_group("fake", rank=rank, world_size=topology.world, store=FakeStore())
        init_distributed(topology, seed=1)

    yield join
    destroy()


@pytest.mark.parametrize("recipe", [*TRAINING, *SUPERVISED])
def test_topology_of_the_recipe(recipe: str, join: Callable[[Topology, int], None], monkeypatch: pytest.MonkeyPatch):
    """The first and the last rank are built, from tensors without memory, and hold what the slice table says."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.megatron_config import transformer_config
    from megatron_dapo.models.storage import check_cover, storages

    monkeypatch.setattr(GPTModel, "to", lambda self, device: self)  # there is nothing to move
    config, arch = load_config([], recipe), architecture(recipe)
    topology = topology_of(config, config.parallel.world_size)
    megatron = transformer_config(arch, config.model, config.parallel)
    megatron.perform_initialization = False
    for rank in {0, topology.world - 1}:
        join(topology, rank)
        with FakeTensorMode(allow_non_fake_inputs=True):
            held = storages(build_model(arch, megatron, deferred_head=True))
        check_cover(held, megatron_slices(arch, topology, rank))
        stage = next(at.pp for at in topology.coordinates() if at.rank == rank)
        assert sum(tensor.numel() for tensor in held.values()) == rank_parameters(arch, topology, stage).total


@pytest.mark.parametrize("recipe", SUPERVISED)
def test_supervised_recipe(recipe: str):
    config = load_config(["model.path=m", "sft.train_files=rows.parquet"], recipe, command="sft")
    check_model(config, model_numbers(architecture(recipe)))


@pytest.mark.parametrize("layout", ["single", "dp2", "ep2", "tp2", "pp2"])
def test_the_demo_runs_under_every_small_layout(layout: str):
    check_model(load_config([f"parallel={layout}"], "demo", command="train"), model_numbers(network("demo")))


@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_algorithms(algorithm: str):
    sizes = ["data.max_response_length=8192", "actor.max_tokens_per_micro_batch=16384"]
    load_config([f"algorithm={algorithm}", "model=qwen2_5_7b", "data=dapo_math_17k", *sizes], command="train")


def test_published_runs_have_the_published_constants():
    """Reference: the three launch scripts of the DAPO recipe (32B on 16 x 8 GPUs)."""
    full, without, early = (load_config([], name) for name in PUBLISHED)
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
        assert {"console", "wandb"} <= set(config.trainer.logger)
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
