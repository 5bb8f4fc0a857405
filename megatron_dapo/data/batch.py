"""The batch: groups of trajectories as one TensorDict, and the union by which each stage adds its result to it."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.types import Group


def to_batch(groups: Sequence[Group], pad_id: int) -> TensorDict:
    """Rows in group order, then sample order; batch size [b].

    Fields: uid, sample, prompt_length, response_length int64 [b]; prompts int64 [b p] (padded left); responses int64
    [b t] (padded right); response_mask bool [b t] (False on padding and on tool tokens); rollout_log_probs and
    token_level_scores float32 [b t] (the shaped reward sits on the last response token); finish_length bool [b].
    Where every trajectory has its routed experts: rollout_routing, per row a tensor [prompt + response - 1, layers, k].

    Raises DataError when there are no rows, or a trajectory has another number of log-probs or mask values than tokens.
    """
    rows = [(dense, group, i) for dense, group in enumerate(groups) for i in range(len(group.trajectories))]
    if not rows:
        raise DataError("cannot make a batch of no trajectories")
    prompts = [group.prompt.token_ids for _, group, _ in rows]
    trajectories = [group.trajectories[i] for _, group, i in rows]
    prompt_length = torch.tensor([len(ids) for ids in prompts])
    response_length = torch.tensor([len(trajectory.response_ids) for trajectory in trajectories])
    shape = (len(rows), max(1, int(response_length.max())))  # a batch of empty responses still has one (masked) column
    left = torch.full((len(rows), int(prompt_length.max())), pad_id)
    responses = torch.full(shape, pad_id)
    mask = torch.zeros(shape, dtype=torch.bool)
    log_probs, scores = torch.zeros(shape), torch.zeros(shape)
    for row, ((_, group, i), trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        length = len(trajectory.response_ids)
        response_mask = trajectory.response_mask if trajectory.response_mask is not None else (1,) * length
        if len(trajectory.rollout_log_probs) != length or len(response_mask) != length:
            raise DataError(
                f"trajectory {trajectory.uid}/{trajectory.sample}: {length} response tokens but "
                f"{len(trajectory.rollout_log_probs)} log-probs and {len(response_mask)} mask values"
            )
        left[row, left.shape[1] - len(prompts[row]) :] = torch.tensor(prompts[row])
        if length:  # an empty response has no token to carry its reward
            responses[row, :length] = torch.tensor(trajectory.response_ids)
            mask[row, :length] = torch.tensor(response_mask, dtype=torch.bool)
            log_probs[row, :length] = torch.tensor(trajectory.rollout_log_probs)
            scores[row, length - 1] = group.scores[i].reward
    batch = TensorDict(
        {
            "uid": torch.tensor([dense for dense, _, _ in rows]),
            "sample": torch.tensor([trajectory.sample for trajectory in trajectories]),
            "prompts": left,
            "prompt_length": prompt_length,
            "responses": responses,
            "response_length": response_length,
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "token_level_scores": scores,
            "finish_length": torch.tensor([trajectory.finish_reason == "length" for trajectory in trajectories]),
        },
        batch_size=[len(rows)],
    )
    routing = [trajectory.routed_experts for trajectory in trajectories if trajectory.routed_experts is not None]
    if len(routing) == len(rows):
        batch["rollout_routing"] = ragged([_signed(one) for one in routing])
    return batch


def ragged(of_rows: Sequence[Tensor]) -> NonTensorStack:
    """A field whose tensors differ in length from row to row; it is indexed like any other."""
    return NonTensorStack(*[NonTensorData(row) for row in of_rows])


def _signed(ids: np.ndarray) -> Tensor:
    """Expert ids as a tensor; torch hardly computes with uint16, and no model has 32768 experts."""
    return torch.from_numpy(ids.view(np.int16) if ids.dtype == np.uint16 else ids)


def union(batch: TensorDict, new: TensorDict) -> TensorDict:
    """`batch` with the fields of `new`. A field present in both must be equal; otherwise DataError names it."""
    if batch.batch_size != new.batch_size:
        raise DataError(f"union: {list(batch.batch_size)} rows and {list(new.batch_size)} rows cannot be joined")
    merged = batch.copy()
    present = set(batch.keys())
    for key in new.keys():  # noqa: SIM118 - iterating a TensorDict walks its rows
        if key in present and not _same(batch[key], new[key]):
            raise DataError(f"union: field {key!r} is already in the batch with a different value")
        merged.set(key, new.get(key))
    return merged


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise meaning of equal: NaN equals NaN, float32 does not equal bfloat16."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
