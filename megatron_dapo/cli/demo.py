"""`megatron-dapo demo`: the whole line on one machine in minutes, with the same programs that a cluster runs.

Data → warm start by supervised training → DAPO → evaluation → Hugging Face export, checked against `transformers`.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.metrics import METRICS_FILE, read_jsonl
from megatron_dapo.runtime.launcher import launch

ACCURACY = "val-core/math_dapo/acc/mean@"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Demo:
    """Where the demo lives; `overrides` go to the DAPO run (layout, steps, …)."""

    directory: Path
    overrides: tuple[str, ...] = ()

    @property
    def init(self) -> Path:
        return self.directory / "init"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def warm(self) -> Path:
        return self.directory / "warm_start" / "hf"


def run_demo(directory: Path, overrides: Sequence[str] = ()) -> Path:
    """Runs what is not done yet: an interrupted demo goes on, a finished one starts over. Returns the summary."""
    demo, start = Demo(directory, tuple(overrides)), time.time()
    if (directory / SUMMARY).exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if not demo.warm.exists():
        write_inputs(demo)
        _launch("megatron_dapo.sft", warm_start_overrides(demo))
    _launch("megatron_dapo.train", training_overrides(demo))
    summary = summarize(directory, time.time() - start)
    path = directory / SUMMARY
    path.write_text(json.dumps(summary, indent=2) + "\n")
    _tell(directory, summary)
    return path


def write_inputs(demo: Demo) -> None:
    """Problems, a tokenizer trained on them, and a random mixture-of-experts model of two million parameters."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
    from megatron_dapo.data.tokenizer import file_texts, train_tokenizer

    files = write_arithmetic(demo.data, Arithmetic(train_rows=2048, val_rows=512, sft_rows=6800, sft_val_rows=256))
    tokenizer = train_tokenizer(file_texts([files["sft"], files["train"]]), demo.init)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    # transformers starts the padding token at zero; should it ever be sampled, the norm after it has a huge gradient
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.initializer_range)
    disable_progress_bar()  # transformers', for a file of eight megabytes
    model.save_pretrained(demo.init)


def warm_start_overrides(demo: Demo) -> list[str]:
    return [
        "recipe=demo_sft",
        f"model.path={demo.init}",
        f"sft.train_files=[{demo.data}/sft.parquet]",
        f"sft.val_files=[{demo.data}/sft_val.parquet]",
        f"trainer.default_local_dir={demo.warm.parent}",
    ]


def training_overrides(demo: Demo) -> list[str]:
    return [
        "recipe=demo",
        f"model.path={demo.warm}",
        f"data.train_files=[{demo.data}/train.parquet]",
        f"data.val_files=[{demo.data}/val.parquet]",
        f"trainer.default_local_dir={demo.directory}",
        f"trainer.rollout_data_dir={demo.directory}/rollouts",
        *demo.overrides,
    ]


def _launch(module: str, overrides: list[str]) -> None:
    config = load_config(overrides)
    code = launch(module, overrides, config.parallel.world_size or 1)
    if code:
        raise UserError(f"{module} ended with exit code {code}; its error stands above")


def summarize(directory: Path, wall_seconds: float) -> dict:
    """The figures of `summary.json`, from what the run wrote."""
    rows = read_jsonl(directory / METRICS_FILE)
    accuracy = [value for row in rows for name, value in row.items() if name.startswith(ACCURACY)]
    steps = [row for row in rows if "timing_s/step" in row]
    stages = sorted({name for row in steps for name in row if name.startswith("timing_s/")})
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "max_logprob_diff": max(row["training/rollout_logprob_diff_max"] for row in steps),
        "export_max_logit_diff": json.loads((directory / "export_check.json").read_text())["max_logit_diff"],
        "wall_seconds": round(wall_seconds, 1),
        "steps": int(max(row["step"] for row in steps)),
        "stage_seconds": {
            name.removeprefix("timing_s/"): round(sum(row.get(name, 0.0) for row in steps) / len(steps), 4)
            for name in stages
        },
    }


def _tell(directory: Path, summary: dict) -> None:
    print(
        f"\naccuracy on held-out problems at temperature 1: {summary['accuracy_before']:.3f} -> "
        f"{summary['accuracy_after']:.3f} in {summary['steps']} steps, {summary['wall_seconds']:.0f} s\n"
        f"largest |logp_train - logp_rollout| after a push: {summary['max_logprob_diff']:.1e}\n"
        f"largest difference of a logit, Megatron and exported model: {summary['export_max_logit_diff']:.1e}\n"
        f"run:      {directory}  ({METRICS_FILE}, checkpoints/, rollouts/, config.yaml)\n"
        f"plots:    tensorboard --logdir {directory}/tensorboard   or   megatron-dapo report {directory}\n"
        f"exported: {directory}/hf"
    )
