"""Requests and generations as a few flat arrays, so that crossing the process boundary costs microseconds a sample."""

from collections.abc import Sequence
from itertools import chain, groupby, repeat, starmap
from typing import Any

import numpy as np

from megatron_dapo.rollout.requests import Generation, GenerationRequest

FINISH_REASONS = ("stop", "length", "abort")


def pack_requests(requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Prompts and sampling settings are sent once each, however many samples share them."""
    prompts: dict[tuple[int, ...], int] = {}
    samplings: dict[Any, int] = {}
    prompt_index = np.array([prompts.setdefault(r.prompt_ids, len(prompts)) for r in requests], np.int32)
    sampling_index = np.array([samplings.setdefault(r.sampling, len(samplings)) for r in requests], np.int32)
    return {
        "ids": [r.request_id for r in requests],
        "seeds": np.array([r.seed for r in requests], np.int64),
        "priority": np.array([r.priority for r in requests], np.int32),
        "prompt": prompt_index,
        "prompts": flatten(list(prompts), np.int32),
        "sampling": sampling_index,
        "samplings": list(samplings),
    }


def unpack_requests(packed: dict[str, Any]) -> list[GenerationRequest]:
    prompts = [tuple(p.tolist()) for p in unflatten(packed["prompts"])]
    rows = zip(
        packed["ids"],
        packed["prompt"].tolist(),
        packed["seeds"].tolist(),
        packed["sampling"].tolist(),
        packed["priority"].tolist(),
        strict=True,
    )
    return [
        GenerationRequest(request_id, prompts[p], seed, packed["samplings"][s], priority)
        for request_id, p, seed, s, priority in rows
    ]


def pack_generations(generations: Sequence[Generation]) -> dict[str, Any]:
    return {
        "ids": [g.request_id for g in generations],
        "tokens": flatten([g.token_ids for g in generations], np.int32),
        "logprobs": flatten([g.logprobs for g in generations], np.float32),
        "versions": [runs(g.weight_versions) for g in generations],
        "finish": [g.finish_reason for g in generations],
        "stop": [g.stop_reason for g in generations],
        "experts": [g.routed_experts for g in generations],
        "speculation": [g.speculation for g in generations],
    }


def unpack_generations(packed: dict[str, Any]) -> list[Generation]:
    columns = zip(
        packed["ids"],
        unflatten(packed["tokens"]),
        unflatten(packed["logprobs"]),
        packed["finish"],
        packed["stop"],
        packed["versions"],
        packed["experts"],
        packed["speculation"],
        strict=True,
    )
    return [
        Generation(i, tuple(t.tolist()), tuple(lp.tolist()), f, s, tuple(chain.from_iterable(starmap(repeat, v))), e, d)
        for i, t, lp, f, s, v, e, d in columns
    ]


def runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """(value, how often) for every run of equal values; a response has as many as it saw weights, mostly one."""
    return [(value, len(list(run))) for value, run in groupby(values)]


def flatten(rows: Sequence[Sequence[Any]], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths as (all values, where each row ends)."""
    ends = np.cumsum([len(r) for r in rows], dtype=np.int64)
    values: np.ndarray = np.fromiter(chain.from_iterable(rows), dtype, count=int(ends[-1]) if len(rows) else 0)
    return values, ends


def unflatten(flat: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    values, ends = flat
    return np.split(values, ends[:-1]) if len(ends) else []
