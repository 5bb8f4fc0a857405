"""The trained policy in Hugging Face format, and the proof that plain `transformers` computes the same logits."""

import json
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_dapo.data.types import Prompt
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.run import Run

CHECK_FILE = "export_check.json"


def export_and_check(run: Run, prompts: int = 8) -> float:
    """Writes `<run>/hf`, reloads it with `transformers` and returns the largest difference of a logit."""
    directory = run.directory / "hf"
    disable_progress_bar()  # transformers', while it reads the few files back
    run.ranks.group.call("export", directory=directory, source=Path(run.config.model.path))
    dataset = run.validation or run.loader.dataset
    samples = [dataset.draw(index, epoch=0) for index in range(min(prompts, len(dataset)))]
    difference = max(_logit_difference(run, directory, samples))
    (run.directory / CHECK_FILE).write_text(json.dumps({"max_logit_diff": difference, "prompts": len(samples)}))
    print(f"exported to {directory}; logits equal to Megatron's within {difference:.1e}", flush=True)
    return difference


def _logit_difference(run: Run, directory: Path, prompts: list[Prompt]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    differences = []
    for prompt in prompts:
        ours = megatron_logits(run, prompt.token_ids)
        with torch.no_grad():
            theirs = model(torch.tensor([prompt.token_ids])).logits[0]
        differences.append(float((ours[: theirs.shape[0], : theirs.shape[1]] - theirs).abs().max()))
    return differences


def megatron_logits(run: Run, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Logits `[t, padded v]` of one sequence, from the tensor-parallel ranks of the last pipeline stage."""
    length = len(token_ids)
    rows = TensorDict(
        {
            "prompts": torch.tensor([token_ids[:-1]]),
            "prompt_length": torch.tensor([length - 1]),
            "responses": torch.tensor([token_ids[-1:]]),
            "response_length": torch.tensor([1]),
        },
        batch_size=[1],
    )
    dispatcher: Dispatcher = run.ranks.dispatcher
    topology = dispatcher.topology
    parts = run.ranks.group.call("logits", rows=rows)
    wanted = [c for c in topology.coordinates() if (c.pp, c.cp, c.dp) == (topology.pipeline - 1, 0, 0)]
    whole = torch.cat([parts[c.rank] for c in sorted(wanted, key=lambda c: c.tp)], dim=-1)
    return whole
