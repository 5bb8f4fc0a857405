"""From prompts to groups: requests for every sample, spread over the engines, scored, and put together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.algorithms import filter_value
from megatron_dapo.config import Config
from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.errors import UserError
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.rewards import RewardManager
from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling, sample_seed
from megatron_dapo.runtime.group import WorkerGroup


def rollout_hosts(config: Config, topology: Topology, *, node_gpus: int) -> tuple[int, ...]:
    """The ranks that own a rollout engine: on GPUs the first of every `tensor_parallel_size`, on a CPU host rank 0…

    `node_gpus`: ranks of a node, each with a GPU; 0 on a CPU host. Raises UserError for engines that have no place.
    """
    if config.trainer.mode != "sync":
        return ()  # the driver has them
    if not node_gpus:
        return tuple(range(min(engine_count(config), topology.world)))
    width, wanted = config.rollout.tensor_parallel_size, config.rollout.engines  # untested on GPU
    check_width(width, node_gpus)
    places = range(0, topology.world, width)
    if wanted is not None and wanted > len(places):
        raise UserError(
            f"rollout.engines={wanted} of rollout.tensor_parallel_size={width} do not fit {topology.world} GPUs: set "
            f"at most {len(places)}, or null for as many as there is room for"
        )
    return tuple(places[:wanted])


def engine_count(config: Config) -> int:
    """Engines of an asynchronous mode, and of a CPU host."""
    return config.rollout.engines or 1


def check_width(width: int, node_gpus: int) -> None:
    """An engine is a process of one node, and engines fill a node without a rest. Raises UserError."""
    if node_gpus % width:
        legal = ", ".join(str(n) for n in range(1, node_gpus + 1) if node_gpus % n == 0)
        raise UserError(
            f"rollout.tensor_parallel_size={width} does not divide the {node_gpus} GPUs of a node, and an engine does "
            f"not span nodes: use one of {legal}"
        )


def training_sampling(config: Config, stop_token_ids: Sequence[int]) -> Sampling:
    """How responses to train on are drawn."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )


def validation_sampling(config: Config, stop_token_ids: Sequence[int]) -> Sampling:
    """How validation responses are drawn: `do_sample=false` is greedy."""
    val = config.rollout.val_kwargs
    return Sampling(
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        max_tokens=config.data.max_response_length,
        stop=tuple(config.rollout.stop),
        stop_token_ids=tuple(stop_token_ids),
    )


@dataclass(frozen=True)
class Generator:
    """Samples on all engines through the worker group; which engine a prompt lands on does not change its samples."""

    group: WorkerGroup
    hosts: tuple[int, ...]
    seed: int

    def __call__(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, step: int) -> list[list[Trajectory]]:
        """`n` trajectories of every prompt, in order."""
        shares: list[list[GenerationRequest]] = [[] for _ in range(self.group.size)]
        for index, prompt in enumerate(prompts):
            host = self.hosts[index * len(self.hosts) // len(prompts)]
            shares[host] += [
                GenerationRequest(
                    request_id=f"{step}/{prompt.uid}/{sample}",
                    prompt_ids=prompt.token_ids,
                    seed=sample_seed(self.seed, step, prompt.uid, sample),
                    sampling=sampling,
                )
                for sample in range(n)
            ]
        answers = [generation for share in self.group.call("generate", shares) for generation in share]
        by_id = {generation.request_id: generation for generation in answers}
        return [
            [_trajectory(prompt, sample, by_id[f"{step}/{prompt.uid}/{sample}"]) for sample in range(n)]
            for prompt in prompts
        ]


def _trajectory(prompt: Prompt, sample: int, generation: Generation) -> Trajectory:
    return Trajectory(
        uid=prompt.uid,
        sample=sample,
        response_ids=generation.token_ids,
        rollout_log_probs=generation.logprobs,
        finish_reason=generation.finish_reason,
        weight_versions=generation.weight_versions,
        routed_experts=generation.routed_experts,
        speculation=generation.speculation,
    )


def score_groups(
    reward: RewardManager, prompts: Sequence[Prompt], trajectories: Sequence[Sequence[Trajectory]]
) -> list[Group]:
    """Whole groups with their scores; see `scored_part` for samples whose verifier failed."""
    flat = [(prompt, one) for prompt, many in zip(prompts, trajectories, strict=True) for one in many]
    scores = iter(reward.score([prompt for prompt, _ in flat], [one for _, one in flat]))
    return [
        Group(prompt, tuple(many), tuple(next(scores) for _ in many))
        for prompt, many in zip(prompts, trajectories, strict=True)
    ]


def scored_part(group: Group) -> Group:
    """The group without the samples whose verifier failed (status "failed"): nothing is known about those."""
    return _part(group, lambda score: score.status == "ok")


def failed_part(group: Group) -> Group:
    """The other samples."""
    return _part(group, lambda score: score.status != "ok")


def _part(group: Group, wanted: Callable[[Score], bool]) -> Group:
    kept = [(one, score) for one, score in zip(group.trajectories, group.scores, strict=True) if wanted(score)]
    return Group(group.prompt, tuple(one for one, _ in kept), tuple(score for _, score in kept))


def group_values(group: Group, metric: str, final: Mapping[str, Sequence[float]]) -> list[float]:
    """The values by which dynamic sampling judges a group; `final` are its rewards after KL, where the metric asks."""
    rewards = final.get(group.prompt.uid, [score.reward for score in group.scores])
    return [
        filter_value(score, metric, final_reward=reward) for score, reward in zip(group.scores, rewards, strict=True)
    ]


def component_rewards(groups: Sequence[Group], keys: Sequence[str]) -> dict[str, Tensor] | None:
    """The named fields of the reward's extra info, `[b]` each (GDPO); None where none are asked for."""
    if not keys:
        return None
    return {key: torch.tensor([filter_value(score, key) for g in groups for score in g.scores]) for key in keys}
