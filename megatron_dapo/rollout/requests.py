"""What goes into a rollout engine and what comes out: one request is one sample, with its own seed."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

SEED_BITS = 63  # torch.Generator.manual_seed takes a non-negative int64


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_k = -1` and `top_p = 1` switch that filter off; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One sample of one prompt. Keep requests of the same prompt adjacent: their prefix is then computed once."""

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    priority: int = 0  # lower runs first


@dataclass(frozen=True)
class Generation:
    """One sampled response: as many `logprobs` and `weight_versions` as `token_ids`."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled tokens, under the distribution they were drawn from
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None
    weight_versions: tuple[int, ...]
    routed_experts: np.ndarray | None = None  # [prompt + response - 1, layers, top-k]
    speculation: tuple[int, int, int] | None = None  # drafted tokens, accepted ones, verification steps


def added(a: tuple[int, int, int] | None, b: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    """The speculation of two parts of a response together; None where neither knows any."""
    if a is None or b is None:
        return a if b is None else b
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """The seed of one sample: a hash of who it is, so it is the same wherever and beside whatever it is generated."""
    who = f"{run_seed}\0{step}\0{uid}\0{sample}".encode()
    return int.from_bytes(blake2b(who, digest_size=8).digest(), "little") >> (64 - SEED_BITS)
