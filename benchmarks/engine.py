"""Tokens per second of forward + backward + optimizer, against `transformers` + AdamW on the same rows.

    python benchmarks/engine.py [--models dense,moe] [--output benchmarks/results/engine.json]

`equal` rows all have one length, so both sides compute the same tokens; `lognormal` rows do not, and the other side
pads them to the longest as its users do. One process per side and case, whose peak memory stands beside; float32, all
cores. Each figure is the best of the steps after the first (the dense model: of one).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

STEPS = {"dense": 2, "moe": 5}
SIZES = {  # SmolLM2-135M's shape; a mixture of 16 experts, 4 per token
    "dense": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "moe": dict(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    ),
}
ROWS = {"dense": 8, "moe": 32}


def lengths(case: str, count: int) -> torch.Tensor:
    """Response lengths: all 120, or lognormal with a median of 50 (longest about 8 times that)."""
    if case == "equal":
        return torch.full((count,), 120)
    generator = torch.Generator().manual_seed(0)
    quantile = (torch.randperm(count, generator=generator) + 0.5) / count
    return (50 * (0.9 * torch.erfinv(2 * quantile - 1) * 2**0.5).exp()).long().clamp(8, 400)


def rows(case: str, model: str) -> TensorDict:
    """Prompts of 8 tokens and responses whose every token is trained."""
    count, generator = ROWS[model], torch.Generator().manual_seed(1)
    response = lengths(case, count)
    mask = torch.arange(int(response.max()))[None] < response[:, None]
    return TensorDict(
        {
            "prompts": torch.randint(0, 8000, (count, 8), generator=generator),
            "prompt_length": torch.full((count,), 8),
            "responses": torch.randint(0, 8000, tuple(mask.shape), generator=generator) * mask,
            "response_length": response,
            "response_mask": mask,
        },
        batch_size=[count],
    )


def ours(directory: Path, batch: TensorDict) -> Callable[[], float]:
    """One optimizer step of the engine on one packed micro-batch; the loss."""
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.config.training import OptimConfig
    from megatron_dapo.engine.engine import MegatronEngine
    from megatron_dapo.engine.losses import Normalizer, supervised_loss
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.parallel.groups import init_distributed
    from megatron_dapo.parallel.topology import Topology

    init_distributed(Topology(), seed=1)
    engine = MegatronEngine(
        Architecture.from_dir(directory),
        ModelConfig(path=str(directory), dtype="float32"),
        ParallelConfig(),
        Topology(),
        hf_dir=directory,
        optim=OptimConfig(lr=1e-5),
    )
    engine.set_step(1)
    loss = supervised_loss(Normalizer("token-mean", int(batch["response_mask"].sum()), len(batch)))
    return lambda: engine.train_step([batch], loss, ["log_probs"]).metrics["sft/loss"].compute()[""]


def theirs(directory: Path, batch: TensorDict) -> Callable[[], float]:
    """The same with `transformers` on rows padded to the longest, and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    ids = torch.cat([batch["prompts"], batch["responses"]], 1)
    prompt, mask = torch.ones_like(batch["prompts"]), batch["response_mask"]
    attention = torch.cat([prompt, mask.long()], 1)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(ids, attention_mask=attention).logits[:, prompt.shape[1] - 1 : -1]
        token_loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["responses"].flatten(), reduction="none"
        )
        loss = (token_loss * mask.flatten()).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def measure(side: str, model: str, case: str, directory: Path) -> dict[str, float]:
    """In this process: tokens (real ones) per second, the first loss, peak memory."""
    batch = rows(case, model)
    step = {"ours": ours, "transformers": theirs}[side](directory, batch)
    loss = step()
    seconds = []
    for _ in range(STEPS[model] - 1):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    real = int((batch["prompt_length"] + batch["response_length"]).sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"tokens_per_s": real / min(seconds), "seconds": min(seconds), "loss": loss, "peak_gib": peak}


def make_model(model: str, directory: Path) -> None:
    """Random weights on disk, the same for both sides."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    kind = {"dense": LlamaConfig, "moe": Qwen3MoeConfig}[model]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(**SIZES[model], max_position_embeddings=1024)).save_pretrained(directory)


def compare(model: str, case: str, directory: Path) -> dict[str, Any]:
    """Both sides, each in a process of its own."""
    found = {}
    for side in ("transformers", "ours"):
        command = [sys.executable, __file__, "--side", side, "--case", case, "--models", model, "--at", str(directory)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[side] = json.loads(done.stdout.splitlines()[-1])
    ratio = found["ours"]["tokens_per_s"] / found["transformers"]["tokens_per_s"]
    print(
        f"{model:6} {case:10} {found['ours']['tokens_per_s']:8.0f} tokens/s, transformers "
        f"{found['transformers']['tokens_per_s']:8.0f}: {ratio:.2f}x; peak {found['ours']['peak_gib']:.2f} against "
        f"{found['transformers']['peak_gib']:.2f} GiB; loss {found['ours']['loss']:.5f} and "
        f"{found['transformers']['loss']:.5f}",
        flush=True,
    )
    return {"model": model, "case": case, "ratio": ratio, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side")
    parser.add_argument("--case")
    parser.add_argument("--at", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, arguments.models, arguments.case, arguments.at)))
        return
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models.split(","):
            directory = Path(temporary) / model
            make_model(model, directory)
            results += [compare(model, case, directory) for case in ("equal", "lognormal")]
    if arguments.output:
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
        kept = [one for one in kept if one["model"] not in arguments.models.split(",")]
        arguments.output.write_text(json.dumps(kept + results, indent=1) + "\n")


if __name__ == "__main__":
    main()
