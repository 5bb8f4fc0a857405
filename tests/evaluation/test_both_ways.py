"""`megatron-dapo eval` of one model through the embedded engine and through a server: the same files come out.

The model is a table of greedy answers, so that all between the words of the command and the summary is held to account
in seconds; `tests/launch/test_serve.py` does the same with vLLM itself on both sides.
"""

import json
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.cli.main import main
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.evaluation import embedded
from megatron_dapo.rollout.requests import Generation, GenerationRequest
from tests.evaluation.loopback import loopback

MAX_TOKENS = 12
PROBLEMS = 24


class GreedyModel:
    """Right to every second problem, wrong to most others, and endless to every sixth."""

    def __init__(self, rows: list[dict], tokenizer) -> None:
        self.tokenizer, self.table = tokenizer, {}
        for i, row in enumerate(rows):
            truth = row["reward_model"]["ground_truth"]
            said = truth if i % 2 == 0 else "1" * 40 if i % 6 == 1 else f"9{truth}"
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            self.table[tuple(ids)] = [*tokenizer(f"Answer: {said}")["input_ids"], tokenizer.eos_token_id]

    def __call__(self, prompt_ids, max_tokens: int) -> tuple[list[int], str]:
        ids = self.table[tuple(prompt_ids)]
        return ids[:max_tokens], "length" if len(ids) > max_tokens else "stop"

    def reply(self, body: dict) -> dict:
        """As vLLM's completions endpoint does, with `return_token_ids`."""
        ids, reason = self(body["prompt"], body["max_tokens"])
        text = self.tokenizer.decode(ids)
        choice = {"text": text, "token_ids": ids, "finish_reason": reason}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}


class Engine:
    """As much of a RolloutEngine as an evaluation uses."""

    def __init__(self, model: GreedyModel) -> None:
        self.model = model

    def wait_ready(self, _timeout: float) -> None:
        pass

    def submit(self, requests: list[GenerationRequest]) -> list[Future]:
        futures = []
        for request in reversed(requests):  # another order than asked
            assert request.sampling.temperature == 0.0
            ids, reason = self.model(request.prompt_ids, request.sampling.max_tokens)
            zeros = (0,) * len(ids)
            future: Future = Future()
            future.set_result(Generation(request.request_id, tuple(ids), zeros, reason, None, zeros))
            futures.insert(0, future)
        return futures

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    made = Demo(tmp_path_factory.mktemp("both"))
    write_inputs(made)
    return made


def test_the_summaries_and_every_answer_are_equal(demo: Demo, tmp_path: Path, monkeypatch):
    rows = pq.read_table(demo.data / "val.parquet").to_pylist()[:PROBLEMS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val.parquet")
    model = GreedyModel(rows, load_tokenizer(str(demo.init)))
    monkeypatch.setattr(embedded.RolloutEngine, "start", lambda _spec: Engine(model))
    words = [f"model={demo.init}", f"data={tmp_path}/val.parquet", "temperature=0", f"max_tokens={MAX_TOKENS}", "n=2"]
    with loopback() as server:
        server.answer = model.reply
        assert main(["eval", *words, "--output", str(tmp_path / "engine")]) == 0
        assert not server.bodies
        assert main(["eval", *words, "--output", str(tmp_path / "server"), "--server", server.url]) == 0
        assert len(server.bodies) == 2 * PROBLEMS
    ours, theirs = (json.loads((tmp_path / way / "summary.json").read_text()) for way in ("engine", "server"))
    assert ours == theirs
    answers = [pq.read_table(tmp_path / way / "generations.parquet").to_pylist() for way in ("engine", "server")]
    assert answers[0] == answers[1]
    (found,) = ours["sources"].values()
    assert found["estimates"]["avg@2"]["value"] == ours["metrics"]["val-core/math_dapo/acc/mean@2"] == 0.5
    assert (found["samples"], found["truncated"], found["unscored"]) == (2 * PROBLEMS, 2 * PROBLEMS // 6, 0)
