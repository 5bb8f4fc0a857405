"""What one step of ours costs against a bare loop of `transformers` and in-process vLLM, same model and batch, one run.

    python benchmarks/step.py [--steps 40] [--output benchmarks/results/step.json]

Both sample 16 prompts × 8 responses, take one optimizer step on all of them with the rollout's log-probs as the old
ones, and push the weights. The two run one after the other on the same cores; what counts is the ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.metrics import METRICS_FILE, read_jsonl
from megatron_dapo.runtime.launcher import launch

PROMPTS, SAMPLES, WARMUP = 16, 8, 5


def ours(demo: Demo, steps: int, directory: Path) -> list[dict[str, float]]:
    """Seconds per stage of every step of the sync trainer on one rank."""
    overrides = [
        "recipe=demo",
        "parallel.world_size=1",
        "parallel.expert=1",
        f"model.path={demo.init}",
        f"data.train_files=[{demo.data}/train.parquet]",
        f"trainer.default_local_dir={directory}",
        f"trainer.total_training_steps={steps}",
        "data.val_files=[]",
        f"data.gen_batch_size={PROMPTS}",
        "algorithm.filter_groups.enable=false",
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.logger=[jsonl]",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.export_hf=false",
        "trainer.log_samples_every=-1",
    ]
    if code := launch("megatron_dapo.train", overrides, 1):
        raise SystemExit(code)
    rows = read_jsonl(directory / METRICS_FILE)
    return [
        {name.removeprefix("timing_s/"): value for name, value in row.items() if name.startswith("timing_s/")}
        for row in rows
    ]


def bare(demo: Demo, steps: int) -> list[dict[str, float]]:
    """The same work without any of our code, in a process of its own."""
    command = [sys.executable, __file__, "--bare", str(demo.directory), "--steps", str(steps)]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def bare_loop(demo: Demo, steps: int) -> list[dict[str, float]]:
    """A training step in the fewest lines that do it: generate, padded forward and backward, AdamW, reload."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.config import set_current_vllm_config

    from megatron_dapo.data.dataset import PromptDataset, PromptLoader, PromptOptions

    tokenizer = AutoTokenizer.from_pretrained(demo.init)
    loader = PromptLoader(PromptDataset([demo.data / "train.parquet"], tokenizer, PromptOptions(24)), seed=1)
    model = AutoModelForCausalLM.from_pretrained(demo.init, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0)
    llm = LLM(str(demo.init), dtype="float32", enforce_eager=True, max_model_len=40, max_num_seqs=256, block_size=32)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    sampling = SamplingParams(
        n=SAMPLES, max_tokens=16, temperature=1.0, logprobs=0, stop_token_ids=[tokenizer.eos_token_id]
    )

    def push() -> None:
        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.reload_weights(weights_iterator=iter(model.state_dict().items()))
        for module in worker.model_runner.model.modules():
            if "w13_weight" in dict(module.named_parameters(recurse=False)):
                isa = module.quant_method.moe_kernel.fused_experts.isa
                for weight in (module.w13_weight, module.w2_weight):
                    weight.data.copy_(cpu_prepack_moe_weight(weight.data, isa))

    def step() -> dict[str, float]:
        start = time.perf_counter()
        prompts = [prompt.token_ids for prompt in loader.next(PROMPTS)]
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        generated = time.perf_counter()
        rows = [
            (ids, list(one.token_ids), one.logprobs)
            for ids, o in zip(prompts, outputs, strict=True)
            for one in o.outputs
        ]
        width = max(len(ids) + len(response) for ids, response, _ in rows)
        tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
        mask, old = torch.zeros(len(rows), width - 1), torch.zeros(len(rows), width - 1)
        for i, (ids, response, logprobs) in enumerate(rows):
            tokens[i, : len(ids) + len(response)] = torch.tensor([*ids, *response])
            span = slice(len(ids) - 1, len(ids) - 1 + len(response))
            mask[i, span] = 1
            old[i, span] = torch.tensor([chosen[t].logprob for chosen, t in zip(logprobs, response, strict=True)])
        reward = torch.randn(PROMPTS, SAMPLES)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        logits = (
            model(tokens, attention_mask=(torch.arange(width) < width).expand(len(rows), -1)).logits[:, :-1].float()
        )
        logprob = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.exp((logprob - old) * mask)
        loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trained = time.perf_counter()
        push()
        llm.reset_prefix_cache()
        end = time.perf_counter()
        return {"gen": generated - start, "train": trained - generated, "push": end - trained, "step": end - start}

    return [step() for _ in range(steps)]


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds per stage of the steady steps."""
    steady = steps[WARMUP:]
    return {name: round(statistics.median(row.get(name, 0.0) for row in steady), 4) for name in sorted(steady[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        print(json.dumps(bare_loop(Demo(arguments.bare), arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as directory:
        demo = Demo(Path(directory))
        write_inputs(demo)
        theirs = medians(bare(demo, arguments.steps))
        mine = medians(ours(demo, arguments.steps, Path(directory) / "run"))
    overhead = mine["step"] - mine["gen"] - mine.get("update_actor", 0.0)
    result = {
        "ours_s": mine,
        "bare_s": theirs,
        "ratio": round(mine["step"] / theirs["step"], 3),
        "share_neither_generation_nor_training": round(overhead / mine["step"], 3),
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
