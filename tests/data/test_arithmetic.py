"""The arithmetic files: schema, disjoint splits, right answers, one command for the same bytes."""

import pyarrow.parquet
import pytest

from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
from megatron_dapo.data.errors import DataError
from megatron_dapo.rewards import compute_score

SMALL = {"train_rows": 60, "val_rows": 20, "sft_rows": 60, "sft_val_rows": 10}


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def pair(question):
    for operator in "+-*":
        if operator in question:
            left, _, right = question.removesuffix("=?").partition(operator)
            return frozenset((int(left), int(right)))
    raise AssertionError(question)


def test_sizes_schema_and_answers(tmp_path):
    paths = write_arithmetic(tmp_path, Arithmetic(**SMALL))
    assert {split: len(rows(path)) for split, path in paths.items()} == {
        "sft": 60,
        "train": 60,
        "val": 20,
        "sft_val": 10,
    }
    for index, row in enumerate(rows(paths["train"])):
        question = row["prompt"][0]["content"]
        assert row["prompt"] == [{"content": question, "role": "user"}]
        assert (
            str(sum(pair(question)) if len(pair(question)) == 2 else 2 * min(pair(question)))
            == (row["reward_model"]["ground_truth"])
        )
        assert row["extra_info"] == {"index": index, "raw_problem": question, "split": "train"}
        assert row["data_source"] == "math_dapo"


def test_sft_responses_satisfy_the_ordinary_verifier_in_both_modes(tmp_path):
    for row in rows(write_arithmetic(tmp_path, Arithmetic(**SMALL))["sft"]):
        left, _, right = row["prompt"].removesuffix("=?").partition("+")
        for strict in (False, True):
            assert compute_score("math_dapo", row["response"], str(int(left) + int(right)), strict=strict)["acc"]


@pytest.mark.parametrize("operators", ["+", "-", "+-*"])
def test_splits_share_no_pair_of_operands_in_any_order(tmp_path, operators):
    paths = write_arithmetic(tmp_path, Arithmetic(**SMALL, operators=operators, max_operand=40))
    seen = {}
    for split, path in paths.items():
        for row in rows(path):
            question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
            assert seen.setdefault(pair(question), split) == split


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    first = write_arithmetic(tmp_path / "a", Arithmetic(**SMALL))
    second = write_arithmetic(tmp_path / "b", Arithmetic(**SMALL))
    other = write_arithmetic(tmp_path / "c", Arithmetic(**SMALL, seed=2))
    assert rows(first["train"]) == rows(second["train"]) != rows(other["train"])


def test_zero_padding_fixes_the_width(tmp_path):
    paths = write_arithmetic(tmp_path, Arithmetic(**SMALL, zero_pad=True))
    assert {len(row["prompt"]) for row in rows(paths["sft"])} == {len("07+45=?")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_operand": 5}, "distinct problems"),
        ({"operators": "/"}, "operators='/'"),
        ({"operators": ""}, "operators=''"),
        ({"max_operand": 0}, "max_operand=0"),
    ],
)
def test_impossible_wishes_are_errors_and_write_nothing(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        write_arithmetic(tmp_path, Arithmetic(**{**SMALL, **options}))
    assert list(tmp_path.iterdir()) == []
