"""What a rollout engine adds to vLLM: the process boundary, and one request with its own seed per sample.

Run: python benchmarks/rollout.py. Prints the figures and writes benchmarks/results/rollout.json. Times are CPU time,
the best of several rounds that take turns, so that other work on the machine counts little.
"""

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "rollout.json"
PROMPTS, SAMPLES, TOKENS = 16, 8, 4  # the smallest step anyone takes: what is added weighs most
RESPONSE = 512  # tokens per sample on the wire


def wire_ms(repeats: int = 50) -> dict[str, float]:
    """128 requests there and 128 generations back, through a pipe: packing, pickling, copying, unpacking."""
    from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling, sample_seed
    from megatron_dapo.rollout.wire import pack_generations, pack_requests, unpack_generations, unpack_requests

    prompts = [tuple(range(p, p + 64)) for p in range(PROMPTS)]
    asked = [
        GenerationRequest(f"{p}-{s}", prompts[p], sample_seed(0, 0, str(p), s), Sampling())
        for p in range(PROMPTS)
        for s in range(SAMPLES)
    ]
    ids, zeros, ones = tuple(range(RESPONSE)), (-0.5,) * RESPONSE, (1,) * RESPONSE
    got = [Generation(r.request_id, ids, zeros, "length", None, ones) for r in asked]
    ours, theirs = Pipe()

    def requests() -> None:
        ours.send(("submit", 0, (pack_requests(asked),)))
        unpack_requests(theirs.recv()[2][0])

    def generations() -> None:
        for start in range(0, len(got), 16):  # they come as they finish
            theirs.send(("results", None, pack_generations(got[start : start + 16])))
            unpack_generations(ours.recv()[2])

    least = [float("inf"), float("inf")]
    for _ in range(repeats):
        for i, work in enumerate((requests, generations)):
            begin = time.thread_time()
            work()
            least[i] = min(least[i], 1e3 * (time.thread_time() - begin))
    size = len(pickle.dumps(pack_generations(got)))
    return {"requests_ms": least[0], "generations_ms": least[1], "bytes_per_token": size / (len(got) * RESPONSE)}


def write_model(directory: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"head_dim": 32, "intermediate_size": 256, "vocab_size": 64, "eos_token_id": 1, "bos_token_id": None}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = AutoConfig.for_model("qwen3_moe", max_position_embeddings=256, **shape, **own, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def generation_ms(repeats: int = 30) -> dict[str, float]:
    """The same samples by our server (a request and a seed for each) and by bare vLLM (n samples, no seed)."""
    from megatron_dapo.rollout.requests import GenerationRequest, Sampling, sample_seed
    from megatron_dapo.rollout.server import Server
    from megatron_dapo.rollout.spec import EngineSpec
    from megatron_dapo.rollout.wire import pack_requests

    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        server = Server(EngineSpec(directory, max_model_len=64, kv_cache_gb=0.25))
    prompts = [tuple((7 * p + i) % 60 + 2 for i in range(6)) for p in range(PROMPTS)]
    number = iter(range(10**9))
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)

    def ours() -> None:
        step = next(number)
        made = [
            GenerationRequest(f"{step}-{p}-{s}", prompts[p], sample_seed(0, step, str(p), s), sampling)
            for p in range(PROMPTS)
            for s in range(SAMPLES)
        ]
        server.submit(pack_requests(made))
        while server.busy:
            server.step()
        server.results.clear()

    bare = bare_vllm(server.engine, prompts, number)
    least = [float("inf"), float("inf")]
    for i in range(repeats + 3):
        for k, work in enumerate((ours, bare)):
            begin = time.process_time()
            work()
            if i >= 3:
                least[k] = min(least[k], 1e3 * (time.process_time() - begin))
    return {"ours_ms": least[0], "bare_ms": least[1], "ours_over_bare": least[0] / least[1]}


def bare_vllm(engine: Any, prompts: list[tuple[int, ...]], number: Any) -> Callable[[], None]:
    from vllm import SamplingParams

    def generate() -> None:
        step = next(number)
        for p, prompt in enumerate(prompts):
            params = SamplingParams(n=SAMPLES, max_tokens=TOKENS, temperature=1.0, logprobs=0, ignore_eos=True)
            engine.add_request(f"bare-{step}-{p}", {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            engine.step()

    return generate


def main() -> None:
    """Measure, print, save."""
    from megatron_dapo.rollout.spec import EngineSpec, environment

    os.environ.update(environment(EngineSpec(""), True, os.environ))
    results = {"wire": wire_ms(), "generation": generation_ms()}
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM takes seconds to take itself apart


if __name__ == "__main__":
    main()
