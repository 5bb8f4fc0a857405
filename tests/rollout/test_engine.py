"""A real vLLM engine in its process: log-probs, determinism, stopping, aborting, and every way to die."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from megatron_dapo.resharding.messages import TransferError
from megatron_dapo.resharding.transport_peers import Meeting, PeerPublisher, free_port, peer_update
from megatron_dapo.rollout import EngineDied, EngineError, EngineSpec, RolloutEngine, Sampling
from tests import tiny_vllm as tiny
from tests.processes import process_exists


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return tiny.engine("llama")


@pytest.fixture
def victim() -> RolloutEngine:
    """An engine of its own, to be killed."""
    engine = RolloutEngine.start(tiny.spec("llama", name="victim"))
    yield engine
    engine.close()


def test_logprobs_are_those_of_the_sampled_distribution(engine: RolloutEngine) -> None:
    weights = tiny.weights("llama")
    tiny.push(engine, weights, version=0)
    model = tiny.reference("llama", weights)
    for temperature in (1.0, 0.6):
        asked = tiny.requests(sampling=Sampling(temperature=temperature, max_tokens=12, ignore_eos=True))
        assert tiny.worst_difference(model, asked, engine.generate(asked), temperature) < 1e-5


def test_samples_do_not_depend_on_how_the_work_is_split(engine: RolloutEngine) -> None:
    asked = tiny.requests(prompts=4, samples=4)
    together = {g.request_id: g.token_ids for g in engine.generate(asked)}
    assert len(set(together.values())) == len(asked)  # every sample has its own seed
    backwards = engine.generate(asked[::-1])
    assert {g.request_id: g.token_ids for g in backwards} == together
    assert [g.request_id for g in backwards] == [r.request_id for r in asked[::-1]]
    alone = [engine.generate([request])[0] for request in asked[::5]]
    assert {g.request_id: g.token_ids for g in alone}.items() <= together.items()


def test_finish_reasons(engine: RolloutEngine) -> None:
    request = tiny.requests(1, 1)[0]
    free = engine.generate([request])[0]
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 12)
    assert len(free.logprobs) == len(free.weight_versions) == 12
    stop = free.token_ids[5]
    stopped = engine.generate([replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)))])[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_stop_strings() -> None:
    engine = tiny.engine("qwen2")
    request = tiny.requests(1, 1)[0]
    free = engine.generate([request])[0]
    text = f" w{free.token_ids[4]} w{free.token_ids[5]}"
    stopped = engine.generate([replace(request, sampling=replace(request.sampling, stop=("never", text)))])[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", text)
    assert stopped.token_ids == free.token_ids[:6]
    assert len(stopped.logprobs) == len(stopped.weight_versions) == 6


def test_abort_returns_what_was_sampled(engine: RolloutEngine) -> None:
    long = tiny.requests(2, 1, sampling=Sampling(max_tokens=200, ignore_eos=True))
    futures = engine.submit(long)
    short = engine.generate(tiny.requests(1, 1, step=1))[0]
    assert short.finish_reason == "length"
    assert engine.abort([long[0].request_id]) == 1
    aborted = futures[0].result(10)
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 200
    assert len(aborted.logprobs) == len(aborted.weight_versions) == len(aborted.token_ids)
    complete = futures[1].result(60)
    assert len(complete.token_ids) == 200
    assert engine.generate(long[:1])[0].token_ids[: len(aborted.token_ids)] == aborted.token_ids


def test_pause_keeps_requests_where_they_are(engine: RolloutEngine) -> None:
    asked = tiny.requests(2, 2, sampling=Sampling(max_tokens=100, ignore_eos=True))
    straight = [g.token_ids for g in engine.generate(asked)]
    futures = engine.submit(asked)
    engine.pause()
    time.sleep(0.3)
    assert not any(f.done() for f in futures)
    engine.resume()
    assert [f.result(60).token_ids for f in futures] == straight


def test_a_refused_request_leaves_the_engine_alive(engine: RolloutEngine) -> None:
    request = replace(tiny.requests(1, 1)[0], prompt_ids=tuple(range(3, 400)))
    with pytest.raises(EngineError, match="256"):
        engine.generate([*tiny.requests(2, 2, step=1), request])
    with pytest.raises(ValueError, match="twice"):
        engine.generate([tiny.requests(1, 1)[0]] * 2)
    assert engine.generate(tiny.requests(1, 1))[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", pytest.param("engine", marks=pytest.mark.long)])
def test_death_under_tensor_parallelism_leaves_nothing(who: str) -> None:
    """A worker of two, or the engine's process, is killed: the caller knows within seconds, and shared memory is gone."""
    before = set(os.listdir("/dev/shm"))
    engine = RolloutEngine.start(tiny.spec("llama", name="pair", tensor_parallel_size=2))
    engine.wait_ready(300)
    workers = [pid for pid in group_members(engine.pid) if "Worker" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(workers) == 2
    future = engine.submit(tiny.requests(1, 1, sampling=Sampling(max_tokens=200, ignore_eos=True)))[0]
    os.kill(workers[-1] if who == "worker" else engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="pair"):
        future.result(10)
    deadline = time.monotonic() + 10
    while group_members(engine.pid) or set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, (group_members(engine.pid), set(os.listdir("/dev/shm")) - before)
        time.sleep(0.1)


def group_members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and process_exists(int(entry.name)):
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def test_death_reaches_everybody_who_waits(victim: RolloutEngine) -> None:
    """The engine dies while it samples and half of its new weights have come: callers and sender learn it in seconds."""
    victim.wait_ready(300)
    tensors = tiny.weights("llama")
    layout = tiny.whole(tensors)
    destinations = dict(enumerate(victim.layouts()))
    meeting = Meeting("127.0.0.1", free_port(), "doomed", 1, 1, timeout_seconds=20, bucket_bytes=10_000)
    dtypes = victim.dtypes()
    sender = PeerPublisher(0, layout, tensors.__getitem__, {0: layout}, destinations, meeting, dtypes=dtypes)
    sent: list[str] = []

    def parameter(name: str) -> Tensor:
        sent.append(name)
        if len(sent) == 3:
            os.kill(victim.pid, signal.SIGKILL)
        return tensors[name]

    sender.params = parameter
    futures = victim.submit(tiny.requests(sampling=Sampling(max_tokens=200, ignore_eos=True)))
    update = victim.update_weights_soon(peer_update(meeting, destinations, dtypes), 1)
    start = time.monotonic()
    with pytest.raises(TransferError, match="could not complete"):
        sender.send()
    for future in [update, *futures]:
        with pytest.raises(EngineDied, match=r"victim.*SIGKILL"):
            future.result(5)
    with pytest.raises(EngineDied):
        victim.generate(tiny.requests(1, 1))
    assert time.monotonic() - start < 15
    assert not victim.alive


def test_death_while_starting(victim: RolloutEngine) -> None:
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        victim.wait_ready(30)


def test_a_model_that_cannot_load_says_why(tmp_path: Path) -> None:
    engine = RolloutEngine.start(EngineSpec(str(tmp_path), name="broken"))
    with pytest.raises(EngineDied, match=r"broken.*exited with code 1(.|\n)*Traceback"):
        engine.wait_ready(120)
    engine.close()


def test_the_engine_dies_with_its_owner() -> None:
    code = (
        "import os, sys\n"
        "from megatron_dapo.rollout import EngineSpec, RolloutEngine\n"
        f"engine = RolloutEngine.start(EngineSpec({tiny.model_directory('llama')!r}, kv_cache_gb=0.125), on_cpu=True)\n"
        "print(engine.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    owner = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    pid = int(owner.stdout)
    deadline = time.monotonic() + 10
    while process_exists(pid):
        assert time.monotonic() < deadline, f"engine {pid} outlived its owner"
        time.sleep(0.1)
