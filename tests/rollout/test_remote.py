"""An engine in a Ray actor on another node: the samples, weights and interruptions of a local one, and a death in time."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron_dapo.rollout import EngineDied, EngineError, Sampling
from megatron_dapo.rollout.remote import RemoteEngine
from megatron_dapo.runtime.ray import Pool
from tests import tiny_vllm as tiny
from tests.ray_nodes import joined
from tests.runtime.test_launcher import gone, wait_for

pytestmark = pytest.mark.slow
LONG = Sampling(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    with joined():
        pool = Pool.take(2, {"CPU": 2.0})  # the second slot is on the other node
        with RemoteEngine(tiny.spec("llama", name="far"), pool.slots[1]) as started:
            started.wait_ready(300)
            yield started
        pool.release()


def test_it_samples_and_takes_weights_as_a_local_engine_does(engine: RemoteEngine):
    local, asked = tiny.engine("llama"), tiny.requests(prompts=3, samples=3)
    for version, weights in enumerate((tiny.weights("llama"), tiny.changed(tiny.weights("llama"), seed=5))):
        tiny.push(local, weights, version)
        tiny.push(engine, weights, version)
        assert engine.weight_version == version
        expected, got = local.generate(asked), engine.generate(asked)
        assert [(g.token_ids, g.logprobs) for g in got] == [(g.token_ids, g.logprobs) for g in expected]
        assert {v for g in got for v in g.weight_versions} == {version}


def test_requests_are_refused_paused_and_aborted_one_by_one(engine: RemoteEngine):
    bad = tiny.requests(1, 1, step=1, sampling=Sampling(max_tokens=100_000))
    with pytest.raises((EngineError, ValueError)):
        engine.submit([bad[0].__class__("bad", tuple(range(3, 400)), 1, LONG)])[0].result(60)
    engine.pause()
    first, second = engine.submit(tiny.requests(1, 2, step=2, sampling=LONG))
    time.sleep(0.5)
    assert not first.done() and not second.done()
    assert engine.abort(["2-0-0"]) == 1
    assert first.result(30).finish_reason == "abort"
    engine.resume()
    assert len(second.result(60).token_ids) == 200


def test_a_death_reaches_everybody_who_waits_and_a_new_engine_takes_the_slot(engine: RemoteEngine):
    engine.pause()
    waiting = engine.submit(tiny.requests(2, 2, step=3, sampling=LONG))
    pid, killed = engine.pid, time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for future in waiting:
        with pytest.raises(EngineDied, match=r"far .*SIGKILL"):
            future.result(30)
    assert time.monotonic() - killed < 10 and not engine.alive
    with pytest.raises(EngineDied):
        engine.generate(tiny.requests(1, 1, step=4))
    with engine.restart() as again:
        again.wait_ready(300)
        assert len(again.generate(tiny.requests(1, 1, step=5))) == 1
        alive = again.pid
    wait_for(lambda: gone(alive))
