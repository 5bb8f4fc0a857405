"""From a configuration to a rank that stands: architecture, layout, world; and to the driver's Run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_dapo.algorithms import DynamicSampler, check_inputs, kl_controller
from megatron_dapo.config import Config, ConfigError, ModelNumbers, Problem, check_world, model_problems
from megatron_dapo.config.model import topology_of as layout_of
from megatron_dapo.data.dataset import PromptDataset, PromptLoader, PromptOptions
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.errors import UserError
from megatron_dapo.metrics import Trackers
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.hf_files import HFWeights
from megatron_dapo.models.tables import hf_shapes, layout_sizes
from megatron_dapo.parallel.determinism import be_deterministic
from megatron_dapo.parallel.groups import init_distributed
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.resharding.rollout_layout import undivided
from megatron_dapo.rewards import RewardManager
from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.runtime.group import LocalWorkerGroup, TorchrunWorkerGroup, WorkerGroup, control_group
from megatron_dapo.trainers.checkpoints import CheckpointStore, step_of, verify
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.dump import RolloutDump
from megatron_dapo.trainers.efficiency import linear_cost
from megatron_dapo.trainers.expert_load import ExpertLoad
from megatron_dapo.trainers.generation import Generator, training_sampling, validation_sampling
from megatron_dapo.trainers.run import Run
from megatron_dapo.trainers.saving import Saver
from megatron_dapo.trainers.stages import Ranks
from megatron_dapo.trainers.worker import Worker, counts_experts


def rank() -> int:
    """This process's number in the world that the launcher started; 0 alone."""
    return int(os.environ.get("RANK", "0"))


def topology_of(config: Config, world: int | None = None) -> Topology:
    """The layout of a world of so many ranks; None: of the one that the launcher started.

    Raises ConfigError where they do not fit.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    check_world(config, world)
    return layout_of(config.parallel, world)


def checked_architecture(config: Config, world: int | None = None) -> Architecture:
    """The model's architecture, after checking that both layouts fit it and that its weights are all there."""
    arch = Architecture.from_dir(config.model.path)
    numbers = model_numbers(arch)
    if problems := [*model_problems(config, numbers, world), *_engine_problems(config, arch)]:
        raise ConfigError(problems)
    with HFWeights(Path(config.model.path)) as weights:
        for name in hf_shapes(arch):
            weights.file_of(name)  # raises for a tensor that no file has
    return arch


def model_numbers(arch: Architecture) -> ModelNumbers:
    """The architecture in the words of the configuration's checks."""
    topk = arch.mixture.topk if arch.mixture else 0
    return ModelNumbers(**layout_sizes(arch), topk=topk, max_positions=arch.max_positions)


def _engine_problems(config: Config, arch: Architecture) -> Iterator[Problem]:
    key, tensor = "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size
    expert_parallel = bool(config.rollout.engine_kwargs.get("enable_expert_parallel"))
    if wrong := undivided(arch, tensor, expert_parallel):
        yield Problem(key, tensor, f"Does not divide {', nor '.join(wrong)}.")


def join_world(config: Config, topology: Topology) -> dist.ProcessGroup | None:
    """Process groups of this rank; the control group where there are other ranks."""
    _enter_world(config, topology)
    return control_group() if topology.world > 1 else None


def _enter_world(config: Config, topology: Topology) -> None:
    if config.trainer.full_determinism:
        be_deterministic()
    init_distributed(topology, config.trainer.seed)


def build_worker(config: Config, total_steps: int) -> Worker:
    """This rank, in a world that its environment describes and that the driver is no part of: a Ray actor."""
    topology = topology_of(config)
    arch = checked_architecture(config, topology.world)
    _enter_world(config, topology)
    return Worker(config, arch, topology, rank(), total_steps)


def worker_group(worker: object, control: dist.ProcessGroup | None) -> WorkerGroup:
    """The driver's hand on all ranks."""
    return LocalWorkerGroup(worker) if control is None else TorchrunWorkerGroup(worker, control)


@dataclass(frozen=True)
class Inputs:
    """What the driver reads before any engine starts, so that bad data ends a run in seconds."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    validation: PromptDataset | None
    total_steps: int


def read_inputs(config: Config) -> Inputs:
    """Tokenizer and prompt files; raises one clear error for whatever is wrong with them."""
    data, trainer = config.data, config.trainer
    tokenizer = load_tokenizer(config.model.path)
    options = PromptOptions(
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        prompt_key=data.prompt_key,
        system_prompt=data.system_prompt,
        chat_template_kwargs=data.chat_template_kwargs,
        apply_chat_template=data.apply_chat_template,
    )
    train = PromptDataset(data.train_files, tokenizer, options, max_samples=data.train_max_samples)
    validation = None
    if data.val_files:
        validation = PromptDataset(data.val_files, tokenizer, options, max_samples=data.val_max_samples)
    total = trainer.total_training_steps or trainer.total_epochs * len(train) // data.train_batch_size
    if total < 1:
        raise UserError(
            f"data.train_batch_size={data.train_batch_size} is more than the {len(train)} prompts of an epoch; "
            "lower it or set trainer.total_training_steps"
        )
    check_inputs(config.algorithm.adv_estimator, estimator_inputs(config))
    return Inputs(tokenizer, train, validation, total)


def estimator_inputs(config: Config) -> set[str]:
    """What this run can give to an advantage estimator."""
    available = {"group_ids", "old_logprob"}
    available |= {"values"} if config.derived.critic_enabled else set()
    available |= {"sum_pi_squared"} if config.actor.calculate_sum_pi_squared else set()
    available |= {"reward_baselines"} if config.algorithm.adv_estimator == "remax" else set()
    available |= {"component_rewards"} if config.algorithm.gdpo_reward_keys else set()
    available |= {"rollout_is_weights"} if config.algorithm.rollout_correction.rollout_is else set()
    return available


def dispatcher(config: Config, arch: Architecture, topology: Topology) -> Dispatcher:
    """How this run's rows are shared out, by what they cost under this architecture."""
    return Dispatcher(
        topology, config.actor.max_tokens_per_micro_batch, config.trainer.balance_batch, linear_cost(arch)
    )


def build_run(config: Config, topology: Topology, group: WorkerGroup, inputs: Inputs, stop: StopRequest) -> Run:
    """The driver's Run over ranks that stand."""
    directory = Path(config.trainer.default_local_dir)
    config.save(directory)
    stop_ids = (inputs.tokenizer.eos_token_id,)
    filters, kl, data = config.algorithm.filter_groups, config.algorithm.kl_ctrl, config.data
    hosts = tuple(rank for rank, hosting in enumerate(group.call("hosts_engine")) if hosting)
    arch, every = Architecture.from_dir(config.model.path), config.trainer.log_expert_load_every
    store = CheckpointStore(directory / "checkpoints", config.trainer.max_ckpt_to_keep)
    return Run(
        config=config,
        arch=arch,
        directory=directory,
        ranks=Ranks(group, dispatcher(config, arch, topology), hosts, device=group.call("device_name")[0]),
        generate=Generator(group, hosts, config.trainer.seed),
        tokenizer=inputs.tokenizer,
        loader=PromptLoader(inputs.train, seed=data.seed, shuffle=data.shuffle),
        validation=inputs.validation,
        reward=RewardManager(config.reward, inputs.tokenizer, data.max_response_length),
        sampler=DynamicSampler(
            train_batch_size=data.train_batch_size,
            gen_batch_size=config.derived.gen_batch_size,
            max_num_gen_batches=filters.max_num_gen_batches,
            metric=filters.metric,
            enable=filters.enable,
            on_exhausted=filters.on_exhausted,
            surplus=config.derived.surplus,
        ),
        kl=kl_controller(kl.type, kl_coef=kl.kl_coef, target_kl=kl.target_kl, horizon=kl.horizon),
        trackers=Trackers(list(config.trainer.logger), directory, config.model_dump(mode="json")),
        dump=RolloutDump(config, inputs.tokenizer),
        expert_load=ExpertLoad(arch, topology, directory, every, max(group.call("ranks_per_node")))
        if counts_experts(config, arch)
        else None,
        store=store,
        saver=Saver(group, store, config.trainer.async_save),
        total_steps=inputs.total_steps,
        sampling=training_sampling(config, stop_ids),
        validation_sampling=validation_sampling(config, stop_ids),
        stop=stop,
    )


def resume(run: Run) -> None:
    """Continues where `trainer.resume_mode` says; a fresh start where there is nothing to continue."""
    trainer = run.config.trainer
    if (step := saved_since_launch(run.store)) is not None:
        run.restore(run.store.path(step))
    elif trainer.resume_mode == "path":
        directory = Path(trainer.resume_from_path or "")
        step_of(directory)
        if damage := verify(directory):
            raise UserError(
                f"trainer.resume_from_path={str(directory)!r} is damaged ({damage}): give another checkpoint"
            )
        run.restore(directory)
    elif trainer.resume_mode == "auto" and (step := run.store.latest()) is not None:
        run.restore(run.store.path(step))
    if run.step:
        print(f"resumed after step {run.step} of {run.total_steps}", flush=True)


def saved_since_launch(store: CheckpointStore) -> int | None:
    """After a restart: the newest checkpoint of this very launch, which counts whatever `trainer.resume_mode` says."""
    if os.environ.get("LAUNCH_ATTEMPT", "0") == "0":
        return None
    return store.latest(since=float(os.environ["LAUNCH_TIME"]))
