"""The small tokenizer: single digits, every byte, a chat template, the same ids after reloading."""

import pytest

from megatron_dapo.data import chat
from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.tokenizer import EOS, PAD, file_texts, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    files = write_arithmetic(path / "data", Arithmetic(60, 20, 60, 10))
    train_tokenizer(file_texts([files["sft"], files["train"]]), path / "tok")
    return path / "tok"


def test_numbers_are_digits(directory):
    tokens = load_tokenizer(directory).tokenize("Answer: 1234")
    assert tokens[-4:] == ["1", "2", "3", "4"]
    assert len(tokens) <= 7  # the common word is one token


@pytest.mark.parametrize("text", ["", "Answer: 57", "\u00e9\u4e2d\U0001f600", "a\n\t b  c", "12+45=?", "\x00\x7f"])
def test_any_text_survives(directory, text):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_have_fixed_ids(directory):
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.eos_token, tokenizer.eos_token_id) == (
        PAD,
        0,
        EOS,
        1,
    )
    assert len(tokenizer) <= 300


def test_a_turn_costs_one_special_token(directory):
    tokenizer = load_tokenizer(directory)
    text = chat.render(tokenizer, [{"role": "user", "content": "1+2=?"}])
    assert text == "<|user|>1+2=?<|assistant|>"
    ids = chat.encode(tokenizer, text)
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|user|>", "<|assistant|>"]
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2=?"}], add_generation_prompt=True, return_dict=False
    )


def test_an_assistant_turn_ends_with_the_end_token(directory):
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "1+2=?"}, {"role": "assistant", "content": "Answer: 3"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>1+2=?<|assistant|>Answer: 3<eos>"


def test_training_twice_gives_the_same_tokenizer(tmp_path):
    texts = ["Answer: 12", "34+5=?"] * 20
    train_tokenizer(texts, tmp_path / "a")
    train_tokenizer(texts, tmp_path / "b")
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(DataError, match="vocab_size=100"):
        train_tokenizer(["x"], tmp_path, vocab_size=100)


def test_a_directory_without_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
