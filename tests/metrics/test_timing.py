"""Seconds add up by stage, and per-token values merge by tokens."""

import time

import pytest

from megatron_dapo.metrics import Timer, compute, memory_metrics, merge, throughput_metrics, timing_metrics


def test_timer_adds_up_and_survives_exceptions():
    timer = Timer()
    for _ in range(2):
        with timer.stage("gen"):
            time.sleep(0.01)
    with pytest.raises(RuntimeError), timer.stage("reward"):
        raise RuntimeError
    timer.add("gen", 1.0)
    seconds = timer.pop()
    assert 1.02 <= seconds["gen"] < 1.5 and "reward" in seconds
    assert timer.seconds == {}


def test_per_token_timings():
    got = compute(timing_metrics({"gen": 0.5, "ref": 0.3, "reward": 1.0}, response_tokens=6, total_tokens=12))
    assert got == {
        "timing_s/gen": 0.5,
        "timing_s/ref": 0.3,
        "timing_s/reward": 1.0,
        "timing_per_token_ms/gen": pytest.approx(500 / 6),
        "timing_per_token_ms/ref": pytest.approx(25),
    }
    assert compute(timing_metrics({"gen": 0.5})) == {"timing_s/gen": 0.5}


def test_local_updates_merge_by_tokens():
    merged = compute(merge(timing_metrics({"gen": 1.0}, 10), timing_metrics({"gen": 1.0}, 90)))
    assert merged == {"timing_s/gen": 2.0, "timing_per_token_ms/gen": pytest.approx(20.0)}


def test_throughput():
    got = compute(throughput_metrics(600, 2.0, 2))
    assert got == {"perf/total_num_tokens": 600.0, "perf/time_per_step": 2.0, "perf/throughput": 150.0}
    assert compute(merge(throughput_metrics(600, 2.0, 2), throughput_metrics(0, 2.0, 2)))["perf/throughput"] == 75.0
    with pytest.raises(ValueError, match="gpus=0"):
        throughput_metrics(1, 1.0, 0)


def test_memory():
    assert 0.01 < compute(memory_metrics())["perf/cpu_memory_used_gb"] < 1000
