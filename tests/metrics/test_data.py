"""Data metrics agree with the definitions on a batch small enough to check by hand."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.metrics import Histogram, compute, data_metrics, reduce, sequence_balance_metrics
from megatron_dapo.metrics.data import LENGTH_EDGES


def small_batch() -> TensorDict:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    scores = torch.tensor([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    return TensorDict(
        {
            "response_mask": mask,
            "response_length": torch.tensor([3, 1, 0]),
            "prompt_length": torch.tensor([4, 2, 2]),
            "finish_length": torch.tensor([True, False, False]),
            "token_level_scores": scores,
            "token_level_rewards": scores * 2,
            "advantages": torch.tensor([[1.0, 1.0, 1.0], [-1.0, 99.0, 99.0], [99.0, 99.0, 99.0]]),
            "returns": torch.tensor([[1.0, 2.0, 3.0], [0.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
            "values": torch.tensor([[1.0, 2.0, 2.0], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        },
        batch_size=[3],
    )


def test_against_hand_computed_values():
    got = compute(data_metrics(small_batch(), use_critic=True, max_prompt_length=4))
    variance = torch.tensor([1.0, 2.0, 3.0, 0.0]).var()
    residual = torch.tensor([0.0, 0.0, 1.0, -1.0]).var()
    expected = {
        "critic/score/mean": 0.0,
        "critic/score/max": 1.0,
        "critic/score/min": -1.0,
        "critic/rewards/max": 2.0,
        "critic/advantages/mean": 0.5,
        "critic/advantages/max": 1.0,
        "critic/returns/mean": 1.5,
        "critic/values/mean": 1.5,
        "critic/vf_explained_var": float(1 - residual / (variance + 1e-5)),
        "response_length/mean": 4 / 3,
        "response_length/p10": 0.15,  # one of three is empty: within the bin from 0 to a half
        "response_length/p50": 1.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 2.0,
        "response_length_non_aborted/clip_ratio": 0.5,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/max": 4.0,
        "prompt_length/clip_ratio": 1 / 3,
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value), name


def test_row_splits_merge_to_the_whole():
    batch = small_batch()
    whole = compute(data_metrics(batch, use_critic=True))
    parts = compute(reduce(data_metrics(batch[i : i + 1], use_critic=True) for i in range(3)))
    assert parts == pytest.approx(whole)


def test_quantiles_of_lengths_are_within_a_twentieth():
    lengths = torch.arange(1, 30_001)
    found = Histogram.of(lengths, LENGTH_EDGES).compute()
    assert found == pytest.approx({"/p10": 3000, "/p50": 15000, "/p90": 27000, "/p99": 29700}, rel=0.05)


def test_all_aborted_gives_no_score_and_no_exception():
    batch = small_batch()[2:]
    got = compute(data_metrics(batch, use_critic=True))
    assert "critic/score/mean" not in got and "critic/vf_explained_var" not in got
    assert got["response/aborted_ratio"] == 1.0


def test_fields_a_stage_has_not_added_are_simply_absent():
    got = compute(data_metrics(small_batch().exclude("advantages", "returns", "values", "token_level_rewards")))
    assert not any(name.startswith(("critic/advantages", "critic/returns", "critic/rewards")) for name in got)


def test_sequence_balance():
    lengths, partition = [10, 9, 1, 2], [[0, 2], [1, 3]]
    got = compute(sequence_balance_metrics(lengths, partition))
    assert got == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 19.0,
        "global_seqlen/minmax_diff": 16.0,
        "global_seqlen/balanced_min": 11.0,
        "global_seqlen/balanced_max": 11.0,
        "global_seqlen/mean": 11.0,
    }
    assert sequence_balance_metrics([], []) == {}
