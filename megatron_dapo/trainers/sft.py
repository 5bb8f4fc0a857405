"""Supervised training on the same engine: it warm-starts a policy before reinforcement learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from megatron_dapo.config import Config
from megatron_dapo.data.sft import SftDataset, SftRow
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.engine.losses import Normalizer
from megatron_dapo.errors import UserError
from megatron_dapo.metrics import Last, Mean, Metrics, Timer, Trackers, compute, throughput_metrics, timing_metrics
from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.trainers.stages import MiniBatchRows, Ranks
from megatron_dapo.trainers.worker import ACTOR


@dataclass(frozen=True)
class SftRows:
    """The examples and how many optimizer steps they make."""

    train: SftDataset
    validation: SftDataset | None
    total_steps: int


def read_rows(config: Config) -> SftRows:
    """Opens the files of `sft`; raises one clear error for whatever is wrong with them."""
    sft = config.sft
    tokenizer = load_tokenizer(config.model.path)

    def opened(files: Sequence[str]) -> SftDataset:
        return SftDataset(
            files,
            tokenizer,
            max_length=sft.max_length,
            system_prompt=config.data.system_prompt,
            chat_template_kwargs=config.data.chat_template_kwargs,
        )

    train = opened(sft.train_files)
    steps = sft.max_steps or sft.epochs * (len(train) // sft.batch_size)
    if len(train) < sft.batch_size:
        raise UserError(f"sft.batch_size={sft.batch_size} is more than the {len(train)} training rows; lower it")
    return SftRows(train, opened(sft.val_files) if sft.val_files else None, steps)


@dataclass
class SftRun:
    """The driver's side of supervised training."""

    config: Config
    ranks: Ranks
    rows: SftRows
    trackers: Trackers
    output: Path
    stop: StopRequest


def fit_sft(run: SftRun) -> None:
    """`total_steps` optimizer steps, an evaluation now and then, then the model in Hugging Face format."""
    sft, timer = run.config.sft, Timer()
    batches = _batches(run)
    for step in range(1, run.rows.total_steps + 1):
        rows = next(batches)
        with timer.stage("step"):
            metrics = train_step(run.ranks, rows, step)
            last = step == run.rows.total_steps or bool(run.stop)
            if run.rows.validation is not None and (last or (sft.eval_every and step % sft.eval_every == 0)):
                metrics |= evaluate(run)
        seconds, tokens = timer.pop(), sum(len(row.token_ids) for row in rows)
        metrics |= timing_metrics(seconds) | throughput_metrics(tokens, seconds["step"], run.ranks.group.size)
        metrics["training/total_steps"] = Last(run.rows.total_steps)
        run.trackers.log(step, compute(metrics))
        if last:
            break
    run.ranks.group.call("export", directory=run.output, source=Path(run.config.model.path))


def train_step(ranks: Ranks, rows: Sequence[SftRow], step: int) -> Metrics:
    """One optimizer step on the token mean of the negative log-likelihood."""
    batch = to_rows(rows)
    everything = MiniBatchRows(torch.arange(len(batch)), token_mean(batch))
    return ranks.update("update_supervised", batch, [everything], ("response_mask",), step)


def evaluate(run: SftRun) -> Metrics:
    """Mean negative log-likelihood of the held-out responses, per token."""
    total, tokens = 0.0, 0
    validation = run.rows.validation
    rows = [validation[index] for index in range(len(validation))] if validation is not None else []
    for start in range(0, len(rows), run.config.sft.batch_size):
        batch = to_rows(rows[start : start + run.config.sft.batch_size])
        logprob = run.ranks.infer(batch, ACTOR, ["log_probs"])["log_probs"]
        total -= float(logprob[batch["response_mask"]].sum())
        tokens += int(batch["response_mask"].sum())
    return {"sft/val_loss": Mean(total, tokens)}


def token_mean(batch: TensorDict) -> Normalizer:
    return Normalizer("token-mean", int(batch["response_mask"].sum()), len(batch))


def to_rows(rows: Sequence[SftRow]) -> TensorDict:
    """Prompts and responses in the shape that the engine packs; the split is where the loss mask begins."""
    splits = [row.loss_mask.index(1) for row in rows]
    prompts = [torch.tensor(row.token_ids[:split]) for row, split in zip(rows, splits, strict=True)]
    responses = [torch.tensor(row.token_ids[split:]) for row, split in zip(rows, splits, strict=True)]
    masks = [torch.tensor(row.loss_mask[split:]).bool() for row, split in zip(rows, splits, strict=True)]

    def padded(parts: list[torch.Tensor], side: str = "right") -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side=side)

    return TensorDict(
        {
            "prompts": padded(prompts, "left"),
            "prompt_length": torch.tensor(splits),
            "responses": padded(responses),
            "response_length": torch.tensor([len(part) for part in responses]),
            "response_mask": padded(masks),
        },
        batch_size=[len(rows)],
    )


def _batches(run: SftRun) -> Iterator[list[SftRow]]:
    epoch = 0
    while True:
        yield from run.rows.train.batches(run.config.sft.batch_size, seed=run.config.trainer.seed, epoch=epoch)
        epoch += 1
