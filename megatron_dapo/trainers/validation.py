"""Validation during training: held-out prompts, sampled or greedy, through the same engines and verifiers."""

from megatron_dapo.evaluation.summary import scored_metrics
from megatron_dapo.metrics import Metrics
from megatron_dapo.trainers.generation import score_all
from megatron_dapo.trainers.run import Run

CHUNK = 1024  # prompts in flight at once, so that a large set does not become one message


def validate(run: Run) -> Metrics:
    """`val-core/<source>/acc/mean@n` and companions; nothing where there are no validation files."""
    if run.validation is None:
        return {}
    n = run.config.rollout.val_kwargs.n
    rows = []
    with run.timer.stage("testing"):
        for start in range(0, len(run.validation), CHUNK):
            indices = range(start, min(start + CHUNK, len(run.validation)))
            prompts = [run.validation.draw(index, epoch=0) for index in indices]
            trajectories = run.generate(prompts, n, run.validation_sampling, step=-1)
            scores = score_all(run.reward, prompts, trajectories)
            rows += [(prompt, score) for prompt, many in zip(prompts, scores, strict=True) for score in many]
    return scored_metrics([prompt for prompt, _ in rows], [score for _, score in rows])
