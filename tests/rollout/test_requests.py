"""Seeds and the wire format, without an engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling, added, sample_seed
from megatron_dapo.rollout.server import speculation
from megatron_dapo.rollout.spec import EngineSpec, environment, threads_bind, vllm_arguments
from megatron_dapo.rollout.wire import pack_generations, pack_requests, unpack_generations, unpack_requests

REQUESTS = st.lists(
    st.builds(
        GenerationRequest,
        request_id=st.text(max_size=5),
        prompt_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
        seed=st.integers(0, 2**63 - 1),
        sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 0.6, 1.0]), stop=st.sampled_from([(), ("\n",)])),
        priority=st.integers(-3, 3),
    ),
    max_size=5,
)


def test_seeds_are_stable_and_distinct() -> None:
    assert sample_seed(1, 0, "0-5-0", 3) == 2387951289948195026
    seeds = {sample_seed(r, s, f"0-{p}-0", i) for r in range(2) for s in range(3) for p in range(8) for i in range(16)}
    assert len(seeds) == 2 * 3 * 8 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(REQUESTS)
def test_requests_survive_the_wire(requests: list[GenerationRequest]) -> None:
    assert unpack_requests(pack_requests(requests)) == requests


def test_generations_survive_the_wire() -> None:
    experts = np.zeros((3, 2, 2), np.uint8)
    one = Generation("a", (1, 2), (-0.5, -1.25), "stop", 7, (3, 4))
    two = Generation("b", (), (), "abort", None, ())
    three = Generation("c", (9,), (0.0,), "stop", "\n", (4,), experts)
    four = Generation("d", (9,), (0.0,), "stop", None, (4,), speculation=(6, 3, 2))
    assert unpack_generations(pack_generations([four])) == [four]
    got = unpack_generations(pack_generations([one, two, three]))
    assert got[:2] == [one, two]
    assert got[2].routed_experts is experts
    assert unpack_generations(pack_generations([])) == []


def test_shared_prompts_are_sent_once() -> None:
    requests = [GenerationRequest(f"{i}", (1, 2, 3), i, Sampling()) for i in range(8)]
    packed = pack_requests(requests)
    assert packed["prompts"][0].tolist() == [1, 2, 3]
    assert len(packed["samplings"]) == 1


def test_the_launchers_ranks_do_not_reach_vllm() -> None:
    parent = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    env = environment(EngineSpec("m"), on_cpu=True, parent=parent)
    assert env.keys().isdisjoint({"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"})
    assert env["PATH"] == "/bin"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(EngineSpec("m", gpus=(2, 3)), on_cpu=False, parent=parent)
    assert environment(EngineSpec("m", gpus=(2, 3)), on_cpu=False, parent=parent)["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("cpus", "tp", "expected"),
    [(None, 1, "auto"), ((0, 1, 2, 3), 2, "0,1|2,3"), ((4, 5), 1, "4,5"), ((0,), 2, "0|0")],
)
def test_cores_are_shared_out_by_rank(cpus: tuple[int, ...] | None, tp: int, expected: str) -> None:
    assert threads_bind(EngineSpec("m", tensor_parallel_size=tp, cpus=cpus)) == expected


def test_the_users_engine_arguments_win() -> None:
    arguments = vllm_arguments(EngineSpec("m", engine_kwargs={"block_size": 64, "max_logprobs": 5}), on_cpu=True)
    assert (arguments["block_size"], arguments["max_logprobs"]) == (64, 5)
    assert arguments["enforce_eager"] is True
    assert vllm_arguments(EngineSpec("m"), on_cpu=False)["enforce_eager"] is False


def test_speculation_is_asked_for_where_there_is_some_and_counted() -> None:
    plain = vllm_arguments(EngineSpec("m"), on_cpu=True)
    drafting = vllm_arguments(EngineSpec("m", engine_kwargs={"speculative_config": {"method": "ngram"}}), on_cpu=True)
    assert "per_request_spec_decode_metrics" not in plain and drafting["per_request_spec_decode_metrics"] == "summary"
    told = RequestSpecDecodeMetrics.new(3)
    for drafted, accepted in ((3, 2), (3, 0), (2, 2)):
        told.observe(drafted, accepted)
    assert speculation(told) == (8, 4, 3) and speculation(None) is None
    assert (
        added((8, 4, 3), (1, 1, 1)) == (9, 5, 4) and added(None, (1, 1, 1)) == (1, 1, 1) and added(None, None) is None
    )
