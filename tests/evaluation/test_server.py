"""Asking a server over real HTTP: concurrency, retries, refusals, and what is kept when it goes away."""

import time

import pytest

from megatron_dapo.config.evaluation import EvalServerConfig
from megatron_dapo.data.types import Prompt
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation import server as asking
from megatron_dapo.evaluation.answers import Question
from megatron_dapo.evaluation.server import ServerSource
from megatron_dapo.rollout.requests import Sampling
from tests.evaluation.loopback import Loopback, loopback


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.01)
    with loopback() as running:
        yield running


def questions(count: int = 8) -> list[Question]:
    made = []
    for i in range(count):
        prompt = Prompt(f"0-{i}-0", 0, i, 0, (5, i), ({"role": "user", "content": str(i)},), "math", str(i))
        made.append(Question(i, 0, prompt, 1000 + i, Sampling(0.0, 0.7, -1, 9, ("END",))))
    return made


def ask(server: Loopback, asked: list[Question], **config) -> list:
    source = ServerSource(server.url, EvalServerConfig(**config))
    try:
        return sorted((a for batch in source.answers(asked) for a in batch), key=lambda a: a.problem)
    finally:
        source.close()


def test_every_question_is_answered_and_says_how_to_sample(server: Loopback):
    got = ask(server, questions())
    assert [(a.problem, a.sample, a.text, a.tokens) for a in got] == [(i, 0, f"Answer: {i}", 3) for i in range(8)]
    body = next(b for b in server.bodies if b["prompt"] == [5, 3])
    assert (body["model"], body["seed"], body["max_tokens"], body["stop"]) == ("m", 1003, 9, ["END"])
    assert (body["temperature"], body["top_p"], body["top_k"], body["return_token_ids"]) == (0.0, 0.7, -1, True)


def test_chat_sends_messages_and_a_stranger_gets_no_extensions(server: Loopback):
    server.models = [{"id": "gpt"}, {"id": "other"}]
    got = ask(server, questions(2), api="chat", name="other")
    assert [a.text for a in got] == ["Answer: 0", "Answer: 1"]
    assert set(server.bodies[0]) == {"model", "temperature", "top_p", "max_tokens", "seed", "stop", "messages"}
    assert server.bodies[0]["model"] == "other"


def test_requests_are_in_flight_together_but_not_more_than_asked(server: Loopback):
    ask(server, questions(40), concurrency=10)
    assert 5 <= server.most_in_flight <= 10


def test_dropped_refused_and_failing_requests_are_tried_again(server: Loopback):
    server.misbehave = ["drop", 429, 503, 500, "drop"]
    assert len(ask(server, questions())) == 8


def test_an_answer_that_never_comes_is_missing_and_the_others_are_kept(server: Loopback):
    source = ServerSource(server.url, EvalServerConfig(concurrency=1, retries=2))
    server.misbehave = [503, 503, 503]
    kept = []
    with pytest.raises(UserError, match=r"1 of 8 answers could not be had \(HTTP 503"):
        for batch in source.answers(questions()):
            kept += batch
    assert sorted(a.problem for a in kept) == list(range(1, 8))


def test_a_request_that_is_wrong_ends_it_at_once(server: Loopback):
    server.always = 400
    began = time.monotonic()
    with pytest.raises(UserError, match=r"refuses the request: HTTP 400.*as told"):
        ask(server, questions(50))
    assert time.monotonic() - began < 5


def test_nobody_there_and_an_unknown_model(server: Loopback):
    with pytest.raises(UserError, match="no OpenAI-compatible server answers there"):
        ServerSource("http://127.0.0.1:9", EvalServerConfig())
    with pytest.raises(UserError, match=r"server.name=x.*it has m"):
        ServerSource(f"{server.url}/v1", EvalServerConfig(name="x"))
