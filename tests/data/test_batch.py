"""The batch: padding sides, where the reward sits, odd trajectories, and the union of stages."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.data.batch import to_batch, union
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.types import Group, Prompt, Score, Trajectory

PAD = 0


def prompt(uid, ids):
    return Prompt(uid, 0, 0, 0, ids, (), "s", "1")


def trajectory(uid, sample, ids, reason="stop", mask=None):
    return Trajectory(uid, sample, ids, tuple(-0.5 * i for i in ids), reason, (0,) * len(ids), mask)


@pytest.fixture
def batch():
    first = Group(
        prompt("0-7-0", (5, 6, 7)),
        (trajectory("0-7-0", 0, (1, 2), "length"), trajectory("0-7-0", 1, (3, 4, 5), mask=(1, 0, 1))),
        (Score(1.0, 1.0, 1.0), Score(-0.5, 0.5, 0.0)),
    )
    second = Group(prompt("0-2-0", (9,)), (trajectory("0-2-0", 0, ()),), (Score(-1.0, -1.0, 0.0),))
    return to_batch([first, second], PAD)


def test_fields(batch):
    expected = {
        "uid": torch.tensor([0, 0, 1]),
        "sample": torch.tensor([0, 1, 0]),
        "prompts": torch.tensor([[5, 6, 7], [5, 6, 7], [0, 0, 9]]),
        "prompt_length": torch.tensor([3, 3, 1]),
        "responses": torch.tensor([[1, 2, 0], [3, 4, 5], [0, 0, 0]]),
        "response_length": torch.tensor([2, 3, 0]),
        "response_mask": torch.tensor([[True, True, False], [True, False, True], [False, False, False]]),
        "rollout_log_probs": torch.tensor([[-0.5, -1.0, 0.0], [-1.5, -2.0, -2.5], [0.0, 0.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]]),
        "finish_length": torch.tensor([True, False, False]),
    }
    assert set(batch.keys()) == set(expected)
    for name, value in expected.items():
        assert batch[name].dtype == value.dtype and torch.equal(batch[name], value), name
    assert batch.batch_size == torch.Size([3])


def test_only_empty_responses_still_make_a_batch():
    group = Group(prompt("u", (1, 2)), (trajectory("u", 0, ()),), (Score(0.0, 0.0, 0.0),))
    assert to_batch([group], PAD)["responses"].tolist() == [[PAD]]


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match="no trajectories"):
        to_batch([], PAD)


def test_lengths_that_disagree_are_named():
    bad = Trajectory("u", 3, (1, 2), (0.0,), "stop", (0, 0))
    with pytest.raises(DataError, match="u/3: 2 response tokens but 1 log-probs"):
        to_batch([Group(prompt("u", (1,)), (bad,), (Score(0.0, 0.0, 0.0),))], PAD)


def test_union_adds_fields_and_leaves_the_batch_alone(batch):
    new = TensorDict({"advantages": torch.ones(3, 3), "uid": torch.tensor([0, 0, 1])}, batch_size=[3])
    joined = union(batch, new)
    assert torch.equal(joined["advantages"], torch.ones(3, 3))
    assert "advantages" not in set(batch.keys())


@pytest.mark.parametrize(
    "value", [torch.tensor([0, 0, 2]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([[0], [0], [1]])]
)
def test_union_refuses_another_value_for_the_same_field(batch, value):
    with pytest.raises(DataError, match="'uid' is already in the batch with a different value"):
        union(batch, TensorDict({"uid": value}, batch_size=[3]))


def test_union_takes_nan_for_the_same_value():
    one = TensorDict({"x": torch.tensor([float("nan"), 1.0])}, batch_size=[2])
    assert union(one, one.clone())["x"][1] == 1.0


def test_union_refuses_other_rows(batch):
    with pytest.raises(DataError, match=r"\[3\] rows and \[2\] rows"):
        union(batch, batch[:2])
