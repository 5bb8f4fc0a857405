"""Number comparison: disjoint splits, right answers, and a prompt that is continued as it stands, without a template."""

import pyarrow.parquet
import pytest

from megatron_dapo.data.comparison import EXAMPLES, Comparison, write_comparison
from megatron_dapo.data.dataset import PromptDataset, PromptOptions
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.prepare import prepare
from megatron_dapo.data.tokenizer import file_texts, train_tokenizer
from megatron_dapo.rewards import compute_score

SMALL = Comparison(train_rows=60, val_rows=20)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("comparison"), SMALL)


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def numbers(row) -> tuple[int, int]:
    words = row["extra_info"]["raw_problem"].removesuffix(":").split()
    return int(words[2]), int(words[4])


def test_splits_are_disjoint_and_answers_right(files):
    pairs = {split: [frozenset(numbers(row)) for row in rows(path)] for split, path in files.items()}
    assert (len(pairs["train"]), len(pairs["val"])) == (60, 20)
    assert not set(pairs["train"]) & set(pairs["val"]) and len(set(pairs["train"])) == 60
    order = set()
    for row in rows(files["train"]):
        first, second = numbers(row)
        order.add(first < second)
        truth = row["reward_model"]["ground_truth"]
        assert truth == str(max(first, second))
        assert compute_score(row["data_source"], f" {truth}\n", truth)["acc"]
        assert not compute_score(row["data_source"], f" {min(first, second)}\n", truth)["acc"]
    assert order == {True, False}  # the larger one is not always on the same side


def test_the_prompt_is_continued_as_it_stands(files, tmp_path):
    tokenizer = train_tokenizer(file_texts([files["train"]]), tmp_path)
    bare = PromptDataset([files["val"]], tokenizer, PromptOptions(max_prompt_length=200, apply_chat_template=False))
    chat = PromptDataset([files["val"]], tokenizer, PromptOptions(max_prompt_length=200))
    text = tokenizer.decode(bare.draw(0, epoch=0).token_ids)
    assert text == EXAMPLES + rows(files["val"])[0]["extra_info"]["raw_problem"]
    assert tokenizer.decode(chat.draw(0, epoch=0).token_ids) == f"<|user|>{text}<|assistant|>"
    tokenizer.chat_template = None  # what a base model has
    assert len(PromptDataset([files["val"]], tokenizer, bare.options)) == 20
    with pytest.raises(DataError, match="no chat template"):
        PromptDataset([files["val"]], tokenizer, chat.options)


def test_the_same_options_write_the_same_rows_and_too_many_are_refused(files, tmp_path):
    assert rows(write_comparison(tmp_path, SMALL)["train"]) == rows(files["train"])
    assert rows(write_comparison(tmp_path, Comparison(60, 20, seed=2))["train"]) != rows(files["train"])
    with pytest.raises(DataError, match="4005 pairs"):
        write_comparison(tmp_path, Comparison(train_rows=4000, val_rows=6))


def test_it_is_prepared_by_name(tmp_path):
    card = prepare("number-comparison", tmp_path, options={"train_rows": "30", "val_rows": "10"})
    assert [file.rows_written for file in card.files] == [30, 10]
