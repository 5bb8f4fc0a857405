"""Prompts, trajectories and scores as rows of the queue, and whole groups back from them."""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.runtime.queue import Queue, Row, Tags

PENDING, RUNNING, FINISHED, FAILURE = "pending", "running", "finished", "failure"
ROLLOUT_FIELDS = ("responses", "rollout_log_probs", "response_mask", "weight_versions", "rollout")
REWARD_FIELDS = ("rm_scores", "reward")
_PLAIN = ("uid", "sample", "finish_reason", "routed_experts", "speculation", "turns", "tool_calls")


def pack(value: Any) -> Tensor:
    """Plain data as bytes: what comes out is what went in, and nobody guesses how to stack it."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpack(cell: Tensor) -> Any:
    return pickle.loads(cell.numpy().tobytes())


def trajectory_key(uid: str, sample: int) -> str:
    """Never taken apart again: the tags say which prompt a row belongs to, whatever its uid looks like."""
    return f"{uid}_{sample}"


def prompt_row(prompt: Prompt) -> Row:
    rest = {name: value for name, value in vars(prompt).items() if name != "token_ids"}
    return {"prompts": torch.tensor(prompt.token_ids, dtype=torch.int32), "raw_prompt": pack(rest)}


def prompt_tags(step: int, order: int) -> Tags:
    return {"is_prompt": True, "status": PENDING, "global_steps": step, "order": order}


def read_prompt(row: Row) -> Prompt:
    return Prompt(token_ids=tuple(row["prompts"].tolist()), **unpack(row["raw_prompt"]))


def trajectory_row(trajectory: Trajectory) -> Row:
    mask = trajectory.response_mask or (1,) * len(trajectory.response_ids)
    return {
        "responses": torch.tensor(trajectory.response_ids, dtype=torch.int32),
        "rollout_log_probs": torch.tensor(trajectory.rollout_log_probs, dtype=torch.float32),
        "response_mask": torch.tensor(mask, dtype=torch.uint8),
        "weight_versions": torch.tensor(trajectory.weight_versions, dtype=torch.int32),
        "rollout": pack({name: value for name, value in vars(trajectory).items() if name in _PLAIN}),
    }


def trajectory_tags(prompt: Prompt, trajectory: Trajectory) -> Tags:
    versions = trajectory.weight_versions
    return {
        "is_prompt": False,
        "uid": prompt.uid,
        "min_version": min(versions, default=0),
        "max_version": max(versions, default=0),
        "prompt_length": len(prompt.token_ids),
        "response_length": len(trajectory.response_ids),
    }


def read_trajectory(row: Row) -> Trajectory:
    mask = row["response_mask"].tolist()
    return Trajectory(
        response_ids=tuple(row["responses"].tolist()),
        rollout_log_probs=tuple(row["rollout_log_probs"].tolist()),
        weight_versions=tuple(row["weight_versions"].tolist()),
        response_mask=None if all(mask) else tuple(mask),
        **unpack(row["rollout"]),
    )


def score_row(score: Score) -> Row:
    numbers = torch.tensor([score.reward, score.raw, score.acc], dtype=torch.float64)
    return {"rm_scores": numbers, "reward": pack({"extra": score.extra, "status": score.status})}


def read_score(row: Row) -> Score:
    reward, raw, acc = row["rm_scores"].tolist()
    return Score(reward=reward, raw=raw, acc=acc, **unpack(row["reward"]))


def read_groups(queue: Queue, uids: Sequence[str], keys: dict[str, Sequence[str]]) -> list[Group]:
    """Whole groups, in order; `keys` are each prompt's trajectory rows."""
    prompts = [read_prompt(row) for row in queue.get(uids)]
    flat = [key for uid in uids for key in keys[uid]]
    rows = iter(queue.get(flat, (*ROLLOUT_FIELDS, *REWARD_FIELDS)))
    return [_group(prompt, [next(rows) for _ in keys[prompt.uid]]) for prompt in prompts]


def _group(prompt: Prompt, rows: Sequence[Row]) -> Group:
    return Group(prompt, tuple(map(read_trajectory, rows)), tuple(map(read_score, rows)))


def rows_of(tags: dict[str, Tags]) -> dict[str, list[str]]:
    """Each prompt's trajectory keys, of all that the queue lists."""
    rows: dict[str, list[str]] = defaultdict(list)
    for key, tag in tags.items():
        if not tag["is_prompt"]:
            rows[tag["uid"]].append(key)
    return rows


def reissue(queue: Queue, step: int) -> list[Prompt]:
    """What was under way when the rows were saved starts anew: pending, as of this step, without its partial rows.

    Finished groups stay. Doing it twice is doing it once. Returns the prompts to be sent, in the order of sending.
    """
    tags = queue.tags()
    under_way = [key for key, tag in tags.items() if tag["is_prompt"] and tag["status"] in (PENDING, RUNNING)]
    under_way.sort(key=lambda key: tags[key]["order"])
    rows = rows_of(tags)
    queue.clear([key for uid in under_way for key in rows[uid]])
    queue.mark({uid: {"status": PENDING, "global_steps": step} for uid in under_way})
    return [read_prompt(row) for row in queue.get(under_way)]
