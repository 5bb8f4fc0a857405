"""Validation during training: held-out prompts, sampled or greedy, through the same engines and verifiers."""

from collections.abc import Sequence

import torch

from megatron_dapo.data.types import Group
from megatron_dapo.evaluation.summary import scored_metrics
from megatron_dapo.metrics import Mean, Metrics, stats
from megatron_dapo.trainers.generation import score_groups
from megatron_dapo.trainers.run import Run

CHUNK = 1024  # prompts in flight at once, so that a large set does not become one message


def validate(run: Run) -> Metrics:
    """`val-core/<source>/acc/mean@n` and companions; nothing where there are no validation files."""
    if run.validation is None:
        return {}
    n = run.config.rollout.val_kwargs.n
    groups: list[Group] = []
    with run.timer.stage("testing"):
        for start in range(0, len(run.validation), CHUNK):
            indices = range(start, min(start + CHUNK, len(run.validation)))
            prompts = [run.validation.draw(index, epoch=0) for index in indices]
            trajectories = run.generate(prompts, n, run.validation_sampling, step=-1)
            groups += score_groups(run.reward, prompts, trajectories)
    rows = [(group.prompt, score) for group in groups for score in group.scores]
    return scored_metrics([prompt for prompt, _ in rows], [score for _, score in rows]) | _lengths(groups)


def _lengths(groups: Sequence[Group]) -> Metrics:
    """`val-aux/response_length/*`."""
    made = [one for group in groups for one in group.trajectories]
    clipped = sum(one.finish_reason == "length" for one in made)
    lengths = torch.tensor([len(one.response_ids) for one in made])
    return stats("val-aux/response_length", lengths) | {"val-aux/response_length/clip_ratio": Mean(clipped, len(made))}
