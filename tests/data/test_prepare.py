"""Preparing data sets by name: copies removed, cards, local copies, and what goes wrong."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_dapo.data.card import Lengths, removed_copies
from megatron_dapo.data.dataset import PromptDataset, PromptOptions
from megatron_dapo.data.dedup import Deduplicator, identity, prompt_texts
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.prepare import prepare
from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row, write_rows
from megatron_dapo.data.tokenizer import train_tokenizer
from megatron_dapo.rewards import compute_score


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def copies(path, problems=5, times=3, **changes):
    write_rows(
        path,
        (
            prompt_row("math_dapo", f"problem {i}", str(i), index=100 * k + i, split="train") | changes
            for k in range(times)
            for i in range(problems)
        ),
        PROMPT_SCHEMA,
        chunk=4,
    )


def test_copies_become_n(tmp_path):
    copies(tmp_path / "raw.parquet")
    card = prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet")
    (file,) = card.files
    assert (file.rows_read, file.rows_written, file.duplicates, file.copies) == (15, 5, 10, {3: 5})
    assert file.suggested_n == 3
    written = rows(tmp_path / "out/dapo-math-17k.parquet")
    assert [row["extra_info"]["index"] for row in written] == [0, 1, 2, 3, 4]
    saved = json.loads((tmp_path / "out/dapo-math-17k.card.json").read_text())
    assert (saved["files"][0]["duplicates"], saved["files"][0]["suggested_n"]) == (10, 3)
    assert "every problem came 3 times (to evaluate, sample n=3 of each)" in card.text()


def test_spacing_does_not_make_a_new_problem_but_words_do(tmp_path):
    texts = ["a b", "a  b", "a b\n", "a B", "a c"]
    write_rows(
        tmp_path / "raw.parquet",
        (prompt_row("s", text, "1", index=i, split="t") for i, text in enumerate(texts)),
        PROMPT_SCHEMA,
    )
    assert prepare(str(tmp_path / "raw.parquet"), tmp_path / "out").files[0].copies == {1: 2, 3: 1}


def test_copies_are_found_whatever_stands_beside_them(tmp_path):
    """A batch of single user turns, one with a system turn, another source: copies are copies in any of them."""
    user, system = {"role": "user", "content": "a b"}, {"role": "system", "content": "Think."}

    def row(index, source="s", turns=(user,)):
        return prompt_row(source, "", "1", index=index, split="t") | {"prompt": list(turns)}

    plain, mixed = [row(0), row(1)], [row(2), row(3, turns=(system, user)), row(4, "other")]
    batches = [pa.RecordBatch.from_pylist(some, PROMPT_SCHEMA) for some in (plain, mixed)]
    dedup = Deduplicator()
    assert [dedup.keep(batch).num_rows for batch in batches] == [1, 2]
    assert dedup.copies == {1: 2, 3: 1}
    kept = {identity(r["data_source"], r["prompt"]) for r in plain + mixed}
    assert len(kept) == 3 and identity("s", [{"role": "user", "content": " a  b\n"}]) in kept


def test_a_prompt_that_is_text_is_its_users_only_turn():
    texts = prompt_texts(pa.array(["s", "s"]), pa.array(["a", "b"]))
    assert texts[0] == identity("s", [{"role": "user", "content": "a"}])


def test_conflicting_answers_are_counted_once_per_problem(tmp_path):
    truths = ["1", "1", "2", "3", "2"]
    write_rows(
        tmp_path / "raw.parquet",
        (prompt_row("s", "same", truth, index=i, split="t") for i, truth in enumerate(truths)),
        PROMPT_SCHEMA,
    )
    card = prepare(str(tmp_path / "raw.parquet"), tmp_path / "out")
    assert (card.files[0].conflicts, rows(tmp_path / "out/raw.parquet")[0]["reward_model"]["ground_truth"]) == (1, "1")


def test_lengths_in_tokens_with_a_tokenizer(tmp_path):
    train_tokenizer(["problem 1"] * 5, tmp_path / "tok")
    copies(tmp_path / "raw.parquet")
    options = {"tokenizer": str(tmp_path / "tok"), "max_prompt_length": "4"}
    lengths = prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet", options).files[0].lengths
    # two turn marks, the word, the space, the digit
    assert (lengths.unit, lengths.mean, lengths.over_limit, lengths.limit) == ("tokens", 5.0, 5, 4)


def test_the_histogram_covers_every_row():
    import numpy as np

    for values in ([1], [3, 3, 3], list(range(100)), [1, 10_000]):
        lengths = Lengths.of(np.array(values), "tokens", 50)
        assert sum(count for *_, count in lengths.histogram) == len(values)
        assert lengths.text()


def test_gsm8k_from_a_local_directory(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"gsm8k_{split}.jsonl").write_text(
            json.dumps({"question": f"q {split}", "answer": "a\n#### 1,234"}) + "\n"
        )
    prepare("gsm8k", tmp_path / "out", raw)
    for split in ("train", "test"):
        (row,) = rows(tmp_path / f"out/gsm8k-{split}.parquet")
        assert (row["reward_model"]["ground_truth"], row["extra_info"]["split"]) == ("1234", split)
        assert row["prompt"][0]["content"].startswith(f"q {split} Let's think")
        assert compute_score(row["data_source"], "so\n#### 1,234", row["reward_model"]["ground_truth"])["acc"]


def test_math_500_uses_the_instruction_of_dapo(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2", "solution": "..."}) + "\n")
    prepare("math-500", tmp_path / "out", tmp_path / "m.jsonl")
    (row,) = rows(tmp_path / "out/math-500.parquet")
    assert "\n\n1+1?\n\n" in row["prompt"][0]["content"]
    assert compute_score(row["data_source"], "Answer: 2", row["reward_model"]["ground_truth"])["acc"]


def test_arithmetic_by_options_as_words(tmp_path):
    sizes = {"train_rows": "40", "val_rows": "10", "sft_rows": "20", "sft_val_rows": "5", "zero_pad": "true"}
    card = prepare("arithmetic", tmp_path, options=sizes)
    assert [file.rows_written for file in card.files] == [40, 10]
    assert (tmp_path / "sft.parquet").exists()


def test_reasoning_gym_tasks_are_scored_by_their_own_scorer(tmp_path):
    pytest.importorskip("reasoning_gym")
    options = {"train_rows": "4", "val_rows": "2", "max_terms": "3", "seed": "7"}
    prepare("reasoning-gym:basic_arithmetic", tmp_path, options=options)
    for row in rows(tmp_path / "reasoning-gym-basic_arithmetic-train.parquet"):
        truth = row["reward_model"]["ground_truth"]
        result = compute_score(row["data_source"], f"Answer: {truth}", truth, row["extra_info"])
        assert (result["score"], result["acc"]) == (1.0, True)
        assert compute_score(row["data_source"], "Answer: 123456", truth, row["extra_info"])["acc"] is False
    assert len(rows(tmp_path / "reasoning-gym-basic_arithmetic-val.parquet")) == 2


def test_a_local_file_keeps_its_own_extra_columns(tmp_path):
    row = prompt_row("mine", "q", "1", index=0, split="t") | {"difficulty": 3, "nothing": None}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / "mine.parquet")
    prepare(str(tmp_path / "mine.parquet"), tmp_path / "out")
    (written,) = rows(tmp_path / "out/mine.parquet")
    assert (written["difficulty"], written["nothing"]) == (3, None)


def test_an_existing_file_is_kept_unless_asked(tmp_path):
    copies(tmp_path / "raw.parquet")
    prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet")
    with pytest.raises(DataError, match="already exists"):
        prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet")
    prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet", overwrite=True)


def test_a_failure_leaves_nothing_half_written(tmp_path):
    copies(tmp_path / "raw.parquet", problems=2000)
    content = bytearray((tmp_path / "raw.parquet").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = b"\xff" * 400
    (tmp_path / "raw.parquet").write_bytes(content)
    with pytest.raises(DataError):
        prepare("dapo-math-17k", tmp_path / "out", tmp_path / "raw.parquet")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonesuch", {}, "no data set 'nonesuch': use dapo-math-17k"),
        ("aime-2024", {"size": "5"}, r"unknown option\(s\) size"),
        ("arithmetic", {"rows": "5"}, r"unknown option\(s\) rows; there are .*train_rows"),
    ],
)
def test_wrong_words(tmp_path, name, options, message):
    with pytest.raises(DataError, match=message):
        prepare(name, tmp_path / "out", options=options)


@pytest.mark.parametrize("options", [{"nonesuch": 1}, {}])
def test_wrong_reasoning_gym_words(tmp_path, options):
    pytest.importorskip("reasoning_gym")
    task = "basic_arithmetic" if options else "no_such_task"
    with pytest.raises(DataError, match=f"reasoning-gym:{task}"):
        prepare(f"reasoning-gym:{task}", tmp_path / "out", options=options)


@pytest.mark.parametrize("name", ["arithmetic", "number-comparison", "reasoning-gym:basic_arithmetic", "own"])
def test_a_local_copy_of_what_is_not_published_is_refused(tmp_path, name):
    copies(tmp_path / "raw.parquet")
    name = str(tmp_path / "raw.parquet") if name == "own" else name
    with pytest.raises(DataError, match=r"--from .*raw.parquet: only dapo-math-17k, .* and .* is none of them"):
        prepare(name, tmp_path / "out", tmp_path / "raw.parquet")
    assert not (tmp_path / "out").exists()


def test_the_newest_card_that_names_a_file_tells_its_copies(tmp_path):
    for times in (3, 4):
        copies(tmp_path / "raw.parquet", times=times)
        prepare(str(tmp_path / "raw.parquet"), tmp_path / "out", overwrite=True)
    (tmp_path / "out/other.card.json").write_text('{"files": [{"path": "other.parquet", "suggested_n": 9}]}')
    assert removed_copies(tmp_path / "out/raw.parquet") == 4
    assert removed_copies(tmp_path / "out/absent.parquet") == removed_copies(tmp_path / "raw.parquet") == 1


def test_a_local_copy_with_wrong_columns_says_so(tmp_path):
    pyarrow.parquet.write_table(pa.table({"question": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"lacks the column\(s\) data_source, prompt, reward_model; it has question"):
        prepare("aime-2024", tmp_path / "out", tmp_path / "x.parquet")


def test_the_real_aime_file_is_thirty_problems_of_32_copies(shared_data, tmp_path):
    card = prepare("aime-2024", tmp_path, shared_data / "aime-2024.parquet")
    (file,) = card.files
    assert (file.rows_read, file.rows_written, file.copies, file.suggested_n) == (960, 30, {32: 30}, 32)
    tokenizer = train_tokenizer(["1"], tmp_path / "tok")
    dataset = PromptDataset([tmp_path / "aime-2024.parquet"], tokenizer, PromptOptions(max_prompt_length=2048))
    assert len({dataset.draw(i, 0).messages[0]["content"] for i in range(len(dataset))}) == 30


def test_the_real_gsm8k_files_lose_nothing(shared_data, tmp_path):
    for split, size in (("train", 7473), ("test", 1319)):
        card = prepare("gsm8k", tmp_path, shared_data / f"gsm8k_{split}.jsonl")
        assert [(f.rows_read, f.rows_written) for f in card.files] == [(size, size)]
        for row in rows(tmp_path / f"gsm8k-{split}.parquet")[:50]:
            assert compute_score(row["data_source"], f"#### {row['reward_model']['ground_truth']}",
                                 row["reward_model"]["ground_truth"])["acc"]  # fmt: skip
