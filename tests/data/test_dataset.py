"""Prompts from files: formats, bad files, long prompts, and an order that resumes exactly."""

import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.data.dataset import PromptDataset, PromptLoader, PromptOptions
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row, write_rows
from megatron_dapo.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(["1+1=?"] * 5, tmp_path_factory.mktemp("tok"))


def problem(i: int) -> dict:
    return prompt_row("math_dapo", f"{i}+1=?", str(i + 1), index=i, split="train")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_rows(path, map(problem, range(10)), PROMPT_SCHEMA, chunk=4)
    return path


def questions(dataset):
    return [dataset.draw(i, 0).messages[-1]["content"] for i in range(len(dataset))]


def opened(files, tokenizer, **options):
    keys = {"max_prompt_length": 64} | options
    samples = keys.pop("max_samples", -1)
    return PromptDataset(files, tokenizer, PromptOptions(**keys), max_samples=samples)


def test_a_row_becomes_a_prompt(parquet, tokenizer):
    prompt = opened([parquet], tokenizer).draw(3, epoch=2, attempt=1)
    assert prompt.uid == "2-3-1"
    assert tokenizer.decode(prompt.token_ids) == "<|user|>3+1=?<|assistant|>"
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info["index"]) == ("math_dapo", "4", 3)
    assert prompt.messages == ({"role": "user", "content": "3+1=?"},)


def test_the_same_rows_from_every_format(parquet, tokenizer, tmp_path):
    rows = [problem(i) for i in range(10)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows, PROMPT_SCHEMA)
    saved = tmp_path / "saved"
    saved.mkdir()
    for part, piece in enumerate((table.slice(0, 6), table.slice(6))):
        with pa.ipc.new_stream(saved / f"data-{part:05d}-of-00002.arrow", piece.schema) as writer:
            writer.write_table(piece)
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(table, hub / "data" / "train-0.parquet")
    expected = [f"{i}+1=?" for i in range(10)]
    for files in ([parquet], [lines], [saved], [hub], [str(parquet)]):
        assert questions(opened(files, tokenizer)) == expected


def test_a_directory_saved_by_the_datasets_package_opens(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([problem(i) for i in range(10)]).save_to_disk(tmp_path / "ds")
    assert len(opened([tmp_path / "ds"], tokenizer)) == 10


def test_several_files_follow_each_other(parquet, tokenizer, tmp_path):
    other = tmp_path / "more.parquet"
    write_rows(other, map(problem, range(10, 13)), PROMPT_SCHEMA)
    assert questions(opened([parquet, other], tokenizer)) == [f"{i}+1=?" for i in range(13)]


def test_a_plain_text_prompt_is_a_user_turn(tokenizer, tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps({"question": "hi", "data_source": "s", "reward_model": {"ground_truth": 5}}) + "\n")
    prompt = opened([path], tokenizer, prompt_key="question").draw(0, 0)
    assert (prompt.messages, prompt.ground_truth, prompt.extra_info) == (({"role": "user", "content": "hi"},), "5", {})


def test_no_scratch_file_is_left(parquet, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = opened([parquet], tokenizer)
    assert os.listdir(tmp_path) == []
    assert len(questions(dataset)) == 10


def test_system_prompt_and_template_arguments(parquet, tokenizer):
    prompt = opened([parquet], tokenizer, system_prompt="add").draw(0, 0)
    assert tokenizer.decode(prompt.token_ids) == "<|system|>add<|user|>0+1=?<|assistant|>"
    thinking = type(tokenizer).from_pretrained(tokenizer.name_or_path) if tokenizer.name_or_path else tokenizer
    template, thinking.chat_template = thinking.chat_template, "{{ messages[0].content }}{{ enable_thinking }}"
    prompt = opened([parquet], thinking, chat_template_kwargs={"enable_thinking": False}).draw(0, 0)
    assert tokenizer.decode(prompt.token_ids) == "0+1=?False"
    thinking.chat_template = template


def test_max_samples_keeps_the_first(parquet, tokenizer):
    assert questions(opened([parquet], tokenizer, max_samples=3)) == ["0+1=?", "1+1=?", "2+1=?"]


# long prompts: ids of "<|user|>", 40 digits and "<|assistant|>" are 42 tokens


@pytest.fixture
def long_file(tmp_path):
    path = tmp_path / "long.parquet"
    rows = [prompt_row("s", text, "0", index=i, split="t") for i, text in enumerate(["1", "1234567890" * 4, "2"])]
    write_rows(path, rows, PROMPT_SCHEMA)
    return path


def test_error_names_the_row_before_anything_starts(long_file, tokenizer):
    with pytest.raises(DataError, match=r"long\.parquet row 1: the prompt has 42 tokens, more than .*=10"):
        opened([long_file], tokenizer, max_prompt_length=10)


@pytest.mark.parametrize("options", [{"truncation": "drop"}, {"truncation": "left", "filter_overlong_prompts": True}])
def test_drop_removes_it(long_file, tokenizer, options):
    dataset = opened([long_file], tokenizer, max_prompt_length=10, **options)
    assert (questions(dataset), dataset.dropped) == (["1", "2"], 1)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("left", "234567890<|assistant|>"),
        ("right", "<|user|>123456789"),
        ("middle", "<|user|>12347890<|assistant|>"),
    ],
)
def test_truncation_keeps_the_named_part(long_file, tokenizer, policy, text):
    prompt = opened([long_file], tokenizer, max_prompt_length=10, truncation=policy).draw(1, 0)
    assert (len(prompt.token_ids), tokenizer.decode(prompt.token_ids)) == (10, text)


def test_a_prompt_of_exactly_the_limit_stays(long_file, tokenizer):
    assert len(opened([long_file], tokenizer, max_prompt_length=42)) == 3


def test_nothing_left_is_an_error(long_file, tokenizer):
    with pytest.raises(DataError, match=r"no prompt is left of 3 .*too long: 3"):
        opened([long_file], tokenizer, max_prompt_length=1, truncation="drop")


# bad files


def test_missing_file(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"not found: .*absent\.parquet"):
        opened([tmp_path / "absent.parquet"], tokenizer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.parquet", b"not parquet at all"),
        ("empty.parquet", b""),
        ("bad.jsonl", b'{"prompt": [\n'),
        ("empty.jsonl", b""),
        ("bad.arrow", b"xxxx"),
        ("notes.txt", b"hello"),
    ],
)
def test_unreadable_files_are_named(tokenizer, tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        opened([path], tokenizer)


def test_truncated_parquet(parquet, tokenizer, tmp_path):
    path = tmp_path / "half.parquet"
    path.write_bytes(parquet.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cannot read .*half\.parquet: it is corrupt, truncated or not a parquet file"):
        opened([path], tokenizer)


def test_corrupt_pages(parquet, tokenizer, tmp_path):
    content = bytearray(parquet.read_bytes())
    content[8:200] = b"\xff" * 192
    path = tmp_path / "rotten.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rotten\.parquet"):
        opened([path], tokenizer)


def test_wrong_schema_names_what_is_missing_and_what_is_there(tokenizer, tmp_path):
    path = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pa.table({"question": ["a"], "data_source": ["s"]}), path)
    with pytest.raises(DataError, match=r"lacks the column\(s\) prompt, reward_model; it has question, data_source"):
        opened([path], tokenizer)


def test_wrong_kind_of_column(tokenizer, tmp_path):
    path = tmp_path / "flat.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "data_source": ["s"], "reward_model": ["5"]}), path)
    with pytest.raises(DataError, match="reward_model must be a struct with the field ground_truth, but it is string"):
        opened([path], tokenizer)


@pytest.mark.parametrize("prompt", [[], [{"role": "user", "content": None}], None])
def test_a_row_without_turns_is_named(tokenizer, tmp_path, prompt):
    path = tmp_path / "rows.parquet"
    write_rows(path, [problem(0), problem(1) | {"prompt": prompt}], PROMPT_SCHEMA)
    with pytest.raises(DataError, match=r"rows\.parquet row 1: prompt must be a list of turns"):
        opened([path], tokenizer)


def test_several_splits_in_one_directory(tokenizer, tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"several splits \(train\)"):
        opened([tmp_path], tokenizer)


def test_no_files(tokenizer):
    with pytest.raises(DataError, match=r"data\.train_files"):
        opened([], tokenizer)


def test_a_tokenizer_without_chat_template(parquet, tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(DataError, match="has no chat template"):
            opened([parquet], tokenizer)
    finally:
        tokenizer.chat_template = template


# order


def test_every_epoch_draws_every_row_once_in_a_new_order(parquet, tokenizer):
    loader = PromptLoader(opened([parquet], tokenizer), seed=3)
    epochs = [[p.index for p in loader.next(10)] for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert (loader.epoch, loader.offset) == (3, 0)


def test_a_draw_may_cross_the_end_of_an_epoch_and_be_longer_than_it(parquet, tokenizer):
    loader = PromptLoader(opened([parquet], tokenizer), seed=3)
    drawn = loader.next(25)
    assert [p.epoch for p in drawn] == [0] * 10 + [1] * 10 + [2] * 5
    assert len({p.uid for p in drawn}) == 25


def test_without_shuffling_rows_come_in_file_order(parquet, tokenizer):
    loader = PromptLoader(opened([parquet], tokenizer), shuffle=False)
    assert [p.index for p in loader.next(10)] == list(range(10))


@settings(deadline=None, max_examples=25)  # a busy machine
@given(before=st.lists(st.integers(0, 23), max_size=4), after=st.integers(1, 23))
def test_resuming_anywhere_continues_the_same_stream(parquet, tokenizer, before, after):
    dataset = opened([parquet], tokenizer)
    straight, interrupted = PromptLoader(dataset, seed=5), PromptLoader(dataset, seed=5)
    for n in before:
        straight.next(n)
        interrupted.next(n)
    resumed = PromptLoader(dataset, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert [p.uid for p in resumed.next(after)] == [p.uid for p in straight.next(after)]


def test_resuming_exactly_at_the_end_of_an_epoch_is_not_an_empty_epoch(parquet, tokenizer):
    dataset = opened([parquet], tokenizer)
    loader = PromptLoader(dataset)
    loader.next(10)
    assert loader.state_dict() == {"epoch": 1, "offset": 0, "seed": 1, "shuffle": True, "rows": 10}
    resumed = PromptLoader(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert {p.epoch for p in resumed.next(10)} == {1}


@pytest.mark.parametrize("change", [{"rows": 11}, {"seed": 2}, {"shuffle": False}])
def test_resuming_with_other_data_is_refused(parquet, tokenizer, change):
    loader = PromptLoader(opened([parquet], tokenizer))
    with pytest.raises(DataError, match=f"checkpoint has {next(iter(change))}="):
        loader.load_state_dict(loader.state_dict() | change)


def test_the_real_aime_file_opens(shared_data, tokenizer):
    dataset = opened([shared_data / "aime-2024.parquet"], tokenizer, max_prompt_length=2048)
    assert len(dataset) == 960
    prompt = dataset.draw(0, 0)
    assert prompt.ground_truth == "540"
    assert tokenizer.decode(prompt.token_ids).startswith("<|user|>Solve the following math problem step by step.")
