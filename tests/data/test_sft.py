"""Supervised rows: what is trained, how it is encoded, and how it is ordered."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import SFT_SCHEMA, write_rows
from megatron_dapo.data.sft import SftDataset
from megatron_dapo.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(["Answer: 1"] * 5, tmp_path_factory.mktemp("tok"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sft.parquet"
    write_rows(path, ({"prompt": f"{i}+1=?", "response": f"Answer: {i + 1}"} for i in range(10)), SFT_SCHEMA)
    return path


def test_prompt_is_context_and_response_with_its_end_is_trained(file, tokenizer):
    row = SftDataset([file], tokenizer, max_length=32)[3]
    context = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if not mask]
    trained = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert tokenizer.decode(context) == "<|user|>3+1=?<|assistant|>"
    assert tokenizer.decode(trained) == "Answer: 4<eos>"
    assert list(row.loss_mask) == sorted(row.loss_mask)


def test_a_row_equals_what_a_rollout_of_that_response_would_be(file, tokenizer):
    row = SftDataset([file], tokenizer, max_length=32)[0]
    messages = [{"role": "user", "content": "0+1=?"}, {"role": "assistant", "content": "Answer: 1"}]
    assert list(row.token_ids) == tokenizer.apply_chat_template(messages, return_dict=False)


def test_an_epoch_covers_full_batches_in_a_seeded_order(file, tokenizer):
    dataset = SftDataset([file], tokenizer, max_length=32)
    first = list(dataset.batches(3, seed=1, epoch=0))
    assert [len(batch) for batch in first] == [3, 3, 3]
    assert first == list(dataset.batches(3, seed=1, epoch=0)) != list(dataset.batches(3, seed=1, epoch=1))


def test_chat_turns_and_system_prompt(tmp_path, tokenizer):
    path = tmp_path / "turns.parquet"
    turns = [[{"role": "user", "content": "hi"}]]
    pyarrow.parquet.write_table(pa.table({"prompt": turns, "response": ["Answer: 2"]}), path)
    row = SftDataset([path], tokenizer, max_length=64, system_prompt="be brief")[0]
    assert tokenizer.decode(row.token_ids) == "<|system|>be brief<|user|>hi<|assistant|>Answer: 2<eos>"


def test_too_long(file, tokenizer):
    with pytest.raises(DataError, match=r"row 0 has .* tokens, more than sft\.max_length=5"):
        SftDataset([file], tokenizer, max_length=5)[0]


def test_wrong_columns(tmp_path, tokenizer):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), path)
    with pytest.raises(DataError, match=r"lacks the column\(s\) response; it has prompt, answer"):
        SftDataset([path], tokenizer, max_length=32)
