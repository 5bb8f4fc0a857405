"""Coroutines over a real engine: batching, cancelling, and weights that change while tokens are being sampled."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dapo.resharding.transport_shm import WeightPublisher, weight_update
from megatron_dapo.rollout import AsyncRolloutEngine, EngineError, RolloutEngine, Sampling
from tests import tiny_vllm as tiny

LONG = Sampling(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    engine = tiny.engine("llama")
    tiny.push(engine, tiny.weights("llama"), version=0)
    return engine


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def test_the_same_samples_as_the_blocking_engine(engine: RolloutEngine) -> None:
    asked = tiny.requests(prompts=3, samples=3)
    expected = [g.token_ids for g in engine.generate(asked)]
    got = run(AsyncRolloutEngine(engine).generate_all(asked))
    assert [g.token_ids for g in got] == expected


def test_cancelling_aborts_and_the_engine_goes_on(engine: RolloutEngine) -> None:
    async def work() -> None:
        client = AsyncRolloutEngine(engine)
        request = tiny.requests(1, 1, sampling=LONG)[0]
        task = asyncio.create_task(client.generate(request))
        await client.generate(tiny.requests(1, 1, step=1)[0])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await client.generate(replace(request, request_id="again"))
        assert len(again.token_ids) == 200

    run(work())


def test_one_refused_request_does_not_hang_its_neighbours(engine: RolloutEngine) -> None:
    async def work() -> None:
        client = AsyncRolloutEngine(engine)
        good = tiny.requests(1, 1)[0]
        bad = replace(good, request_id="bad", prompt_ids=tuple(range(3, 400)))
        outcomes = await asyncio.gather(client.generate(good), client.generate(bad), return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert (await client.generate(good)).finish_reason == "length"

    run(work())


def test_abort_returns_partial_samples(engine: RolloutEngine) -> None:
    async def work() -> None:
        client = AsyncRolloutEngine(engine)
        tasks = [asyncio.create_task(client.generate(r)) for r in tiny.requests(2, 2, sampling=LONG)]
        await client.generate(tiny.requests(1, 1, step=1)[0])
        assert await client.abort() == 4
        partial = await asyncio.gather(*tasks)
        assert {g.finish_reason for g in partial} == {"abort"}
        assert all(0 < len(g.token_ids) < 200 for g in partial)

    run(work())


@pytest.mark.parametrize("pause", [False, True], ids=["between steps", "paused"])
def test_weights_change_in_flight_and_every_token_knows_whose_it_is(engine: RolloutEngine, pause: bool) -> None:
    old, new = tiny.weights("llama"), tiny.changed(tiny.weights("llama"), 21)
    tiny.push(engine, old, version=4)
    layout = tiny.whole(new)
    destinations = dict(enumerate(engine.layouts()))
    pushing = WeightPublisher(
        0, layout, new.__getitem__, {0: layout}, destinations, "/dev/shm/tiny-vllm-flight", dtypes=engine.dtypes()
    )
    update = weight_update(pushing.write())
    asked = tiny.requests(2, 2, sampling=LONG)

    async def work() -> list:
        client = AsyncRolloutEngine(engine)
        tasks = [asyncio.create_task(client.generate(request)) for request in asked]
        short = Sampling(max_tokens=3, ignore_eos=True)
        await client.generate(tiny.requests(1, 1, step=1, sampling=short)[0])  # some tokens have been sampled by now
        if pause:
            async with client.paused():
                await client.update_weights(update, 5)
        else:
            await client.update_weights(update, 5)
        return await asyncio.gather(*tasks)

    got = run(work())
    pushing.close()
    models = {4: tiny.reference("llama", old), 5: tiny.reference("llama", new)}
    for request, sample in zip(asked, got, strict=True):
        versions = sample.weight_versions
        assert len(versions) == 200
        assert set(versions) == {4, 5}
        assert list(versions) == sorted(versions)
        ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
        for version, model in models.items():
            with torch.no_grad():
                logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            mine = torch.tensor(versions) == version
            difference = (expected - torch.tensor(sample.logprobs))[mine].abs().max()
            assert difference < 1e-5, f"tokens of version {version} were not sampled by those weights alone"
