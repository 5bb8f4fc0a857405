"""A whole evaluation against a server on loopback: files, counts, continuation, and the real AIME problems."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError
from megatron_dapo.config.evaluation import EvalConfig, load_eval_config
from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
from megatron_dapo.data.prepare import prepare
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation import evaluate
from megatron_dapo.evaluation.problems import read_problems
from tests.evaluation.loopback import Loopback, loopback


@pytest.fixture
def server():
    with loopback() as running:
        yield running


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("problems")
    sizes = Arithmetic(train_rows=1, val_rows=12, sft_rows=1, sft_val_rows=1)
    return write_arithmetic(directory, sizes)["val"]


def chat(data: Path, **keys) -> EvalConfig:
    return EvalConfig(data=(str(data),), server={"api": "chat"}, reward={"num_workers": 1}, **keys)


def test_what_an_evaluation_leaves_behind(server: Loopback, problems: Path, tmp_path: Path, capsys):
    summary = evaluate(chat(problems, n=2), tmp_path, server.url)
    rows = pq.read_table(tmp_path / "generations.parquet").to_pylist()
    assert [(row["problem"], row["sample"]) for row in rows] == [(i, s) for i in range(12) for s in range(2)]
    first = rows[0]
    assert first["response"] == f"Answer: {first['prompt'][-1]['content']}" and first["status"] == "ok"
    found = summary["sources"][first["data_source"]]
    assert (found["problems"], found["samples"], found["truncated"], found["unscored"]) == (12, 24, 0, 0)
    mean = sum(row["acc"] for row in rows) / 24
    assert found["estimates"]["avg@2"]["value"] == mean
    assert summary["metrics"][f"val-core/{first['data_source']}/acc/mean@2"] == mean
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert "12 problems, 24 answers" in capsys.readouterr().out


def test_an_interrupted_evaluation_goes_on_where_it_stopped(server: Loopback, problems: Path, tmp_path: Path):
    config = chat(problems).model_copy(
        update={"server": chat(problems).server.model_copy(update={"concurrency": 1, "retries": 0})}
    )
    server.misbehave = [None] * 5 + [503] * 7
    with pytest.raises(UserError, match="7 of 12 answers could not be had"):
        evaluate(config, tmp_path, server.url)
    assert not (tmp_path / "summary.json").exists() and len(server.bodies) == 5
    with (tmp_path / "answers.jsonl").open("a") as stream:
        stream.write('{"problem": 11, "sam')  # as a crash leaves it
    evaluate(config, tmp_path, server.url)
    assert len(server.bodies) == 12
    evaluate(config, tmp_path, server.url)  # nothing is left to ask
    assert len(server.bodies) == 12
    with pytest.raises(UserError, match=r"other settings \(temperature differ\)"):
        evaluate(config.model_copy(update={"temperature": 0.5}), tmp_path, server.url)


def test_the_published_aime_file_is_thirty_problems_of_32_samples(server: Loopback, shared_data: Path, tmp_path: Path):
    published = shared_data / "aime-2024.parquet"
    assert {p.samples for p in read_problems(chat(published), None)} == {32}
    prepare("aime-2024", tmp_path, published)  # removes the copies, and remembers on the card how many there were
    prepared = tmp_path / "aime-2024.parquet"
    assert pq.read_metadata(prepared).num_rows == 30
    assert [p.samples for p in read_problems(chat(prepared), None)] == [32] * 30
    assert {p.samples for p in read_problems(chat(prepared, n=4), None)} == {4}
    summary = evaluate(chat(prepared, n=2), tmp_path / "out", server.url)
    (found,) = summary["sources"].values()
    assert (found["problems"], found["samples"]) == (30, 60)
    assert found["estimates"]["pass@2"]["value"] == 0.0  # nobody solves AIME by repeating the question


def test_copies_of_an_own_file_become_samples_through_the_commands(server: Loopback, problems: Path, tmp_path: Path):
    rows = pq.read_table(problems).to_pylist()[:4] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.v1.parquet")
    assert main(["data", "prepare", str(tmp_path / "own.v1.parquet"), "--output", str(tmp_path / "data")]) == 0
    words = [f"data={tmp_path}/data/own.v1.parquet", "server.api=chat", "reward.num_workers=1"]
    assert main(["eval", *words, "--server", server.url, "--output", str(tmp_path / "out")]) == 0
    (found,) = json.loads((tmp_path / "out/summary.json").read_text())["sources"].values()
    assert (found["problems"], found["samples"]) == (4, 12) and "avg@3" in found["estimates"]


def test_a_source_that_nobody_can_judge_is_an_error_before_anything_is_asked(
    server: Loopback, problems: Path, tmp_path: Path
):
    rows = [row | {"data_source": "riddles"} for row in pq.read_table(problems).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "riddles.parquet")
    with pytest.raises(UserError, match="no verifier for data_source='riddles'"):
        evaluate(chat(tmp_path / "riddles.parquet"), tmp_path / "out", server.url)
    assert not server.bodies


def test_words_become_a_checked_configuration(tmp_path: Path):
    config = load_eval_config(
        [f"model={tmp_path}", "data=[a.parquet,b.parquet]", "temperature=0", "reward.strict=true",
         "chat_template_kwargs={enable_thinking: false}"], server=False,
    )  # fmt: skip
    assert config.data == ("a.parquet", "b.parquet") and config.reward.strict
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert (config.top_p, config.max_tokens, EvalConfig().temperature) == (0.7, 20480, 1.0)
    assert load_eval_config(["data=a", "server.api=chat"], server=True).model == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["data=a"], "Hugging Face directory"),
        (["model=/nowhere", "data=a"], "model = /nowhere"),
        (["model=/tmp"], "Which prompt files"),
        (["model=/tmp", "data=a", "temprature=1"], "Did you mean temperature"),
        (["model=/tmp", "data=a", "n=0"], "n = 0"),
        (["model=/tmp", "data=a", "n"], "write key=value"),
        (["model=/tmp", "data=a", "data.x=1"], "already has the value"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_eval_config(words, server=False)
