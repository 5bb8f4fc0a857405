"""A fleet of two real engines: interruption changes nothing, death costs nothing, and none serves without weights."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron_dapo.rollout import RolloutEngine, Sampling
from megatron_dapo.rollout.fleet import Fleet
from tests import tiny_vllm

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet([RolloutEngine.start(tiny_vllm.spec("qwen3", name=f"fleet-{i}")) for i in range(2)])
    wait_for(lambda: all(seat.loaded for seat in made.seats), 180)
    made.serve(made.wait_loaded())
    yield made
    made.close()


def generate(fleet: Fleet, requests):
    return fleet.run(fleet.generate_all(requests))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_interruptions_lose_no_token_and_change_none(fleet: Fleet):
    requests = tiny_vllm.requests(6, 2, sampling=GREEDY)
    start = time.monotonic()
    expected = generate(fleet, requests).result(60)
    whole = time.monotonic() - start
    waiting = generate(fleet, requests)
    interrupted = 0
    for _ in range(3):
        wait_for(lambda: fleet.in_flight or waiting.done())
        time.sleep(whole / 10)  # a fast machine has soon generated all of it
        interrupted += fleet.in_flight > 0
        fleet.hold()
        assert fleet.in_flight == 0
        fleet.release()
    again = waiting.result(60)
    assert interrupted
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    assert [one.request_id for one in again] == [request.request_id for request in requests]
    assert all(len(one.logprobs) == len(one.weight_versions) == 150 and one.finish_reason == "length" for one in again)
    assert (
        max(
            abs(a - b)
            for x, y in zip(again, expected, strict=True)
            for a, b in zip(x.logprobs, y.logprobs, strict=True)
        )
        < 1e-4
    )


def test_a_dead_engines_requests_go_to_the_other_and_it_comes_back_only_with_weights(fleet: Fleet):
    requests = tiny_vllm.requests(6, 2, step=1, sampling=GREEDY)
    expected = generate(fleet, requests).result(60)
    waiting = generate(fleet, requests)
    wait_for(lambda: all(seat.load for seat in fleet.seats))
    os.kill(fleet.seats[0].engine.engine.pid, signal.SIGKILL)
    assert [one.token_ids for one in waiting.result(30)] == [one.token_ids for one in expected]
    assert not fleet.seats[0].serving and fleet.restarts == 1
    wait_for(lambda: fleet.newcomers, 120)
    generate(fleet, tiny_vllm.requests(2, 2, step=2)).result(60)
    assert fleet.seats[0].load == 0 and not fleet.seats[0].serving
    fleet.serve(fleet.wait_loaded())
    waiting = generate(fleet, tiny_vllm.requests(2, 2, step=3, sampling=GREEDY))
    wait_for(lambda: fleet.seats[0].load > 0)
    waiting.result(60)
