"""What flows from the prompt file to the batch: a prompt, its trajectories, their scores, the group of all three."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One drawn prompt. `uid` names the draw (epoch, index, attempt): a question drawn twice is two groups."""

    uid: str
    epoch: int
    index: int
    attempt: int
    token_ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...]
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled response: the ids that were sampled are the ids that are trained."""

    uid: str
    sample: int
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_versions: tuple[int, ...]  # one per response token: which weights sampled it
    response_mask: tuple[int, ...] | None = None  # None: every token is trained; 0 marks tool or observation tokens
    routed_experts: np.ndarray | None = None  # [prompt + response - 1, layers, top-k]
    speculation: tuple[int, int, int] | None = None  # drafted tokens, accepted ones, verification steps
    turns: int = 1
    tool_calls: int = 0  # turns that an environment answered


@dataclass(frozen=True)
class Score:
    """What the reward said: `raw` before shaping, `reward` after it, `acc` in {0, 1} where the verifier tells."""

    reward: float
    raw: float
    acc: float
    extra: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"  # "ok" | "failed" (infrastructure, not the answer)


@dataclass(frozen=True)
class Group:
    """One prompt with its `rollout.n` trajectories and their scores."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]
