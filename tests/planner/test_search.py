"""The search finds only legal layouts that fit, in order of time, and says why the rest is out."""

import time

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.models.tables import layout_sizes
from megatron_dapo.planner.networks import network
from megatron_dapo.planner.run import plan_run
from megatron_dapo.planner.search import layouts, search
from megatron_dapo.planner.stages import even_split
from megatron_dapo.planner.words import read_request


def test_a_large_mixture_on_128_devices():
    start = time.process_time()
    found = search(
        read_request(["model=qwen3-235b-a22b", "gpus=128", "device=H200", "actor.max_tokens_per_micro_batch=16384"])
    )
    assert time.process_time() - start < 10
    assert found.fitting and found.considered > 200
    times = [one.plan.time.total for one in found.best]
    assert times == sorted(times)
    assert all(one.plan.fits and one.reasons for one in found.best)
    assert sum(found.rejected.values()) + found.fitting == found.considered


def test_its_words_are_the_plan_again():
    found = search(read_request(["recipe=dapo_qwen3_30b_a3b_8gpu"]), limit=3)
    for one in found.best:
        again = plan_run(read_request(["recipe=dapo_qwen3_30b_a3b_8gpu", *reset(), *one.words]))
        assert again.time.total == pytest.approx(one.plan.time.total)


def reset() -> list[str]:
    return [f"parallel.{name}=1" for name in ("tensor", "pipeline", "context", "expert")]


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen3-235b-a22b", "deepseek-v3"])
def test_every_layout_is_legal(name: str):
    arch = network(name)
    seen = list(layouts(arch, 64, 8))
    assert len(seen) == len(set(seen)) > 20
    assert all(topology.problems(**layout_sizes(arch)) == [] for topology in seen)
    assert any(topology.tensor > arch.kv_heads for topology in seen) == (name == "qwen3-235b-a22b")  # replicated


def test_nothing_fits():
    found = search(read_request(["model=qwen3-30b-a3b", "gpus=4", "rollout.gpu_memory_utilization=0.8"]))
    assert not found.best and found.rejected
    with pytest.raises(UserError, match="no rollout engine"):
        search(read_request(["model=deepseek-v3", "gpus=8"]))


@pytest.mark.parametrize(
    ("layers", "pipeline", "expected"),
    [
        (94, 8, (11, 11)),
        (94, 4, (23, 23)),
        (61, 16, (3, 2)),
        (61, 2, (31, 30)),
        (48, 4, (None, None)),
        (5, 4, None),
        (3, 4, None),
    ],
)
def test_uneven_stages(layers: int, pipeline: int, expected):
    assert even_split(layers, pipeline) == expected
    if expected and expected[0]:
        middle = layers - sum(expected)
        assert pipeline == 2 or middle % (pipeline - 2) == 0
