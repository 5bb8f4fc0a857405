"""The route is chosen from where everything runs, engines of another model are refused, and nobody waits for the dead."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.slices import Layout
from megatron_dapo.models.tables import hf_shapes
from megatron_dapo.resharding.checksum import checksum
from megatron_dapo.resharding.layouts import segment
from megatron_dapo.resharding.memory import host_identity
from megatron_dapo.resharding.messages import TransferError
from megatron_dapo.resharding.plan import PlanError
from megatron_dapo.resharding.push import Route, Sender, Standpoint, Target, Update, choose_route, received_bytes
from megatron_dapo.resharding.rollout_layout import rollout_layouts
from megatron_dapo.resharding.transport_files import FileReceiver
from megatron_dapo.resharding.transport_peers import Meeting, PeerReceiver
from megatron_dapo.resharding.transport_ring import RingReceiver
from megatron_dapo.resharding.transport_shm import SharedMemoryReceiver
from tests.resharding.test_transports import ARCH, CONFIG, DTYPES, SMALL, SOURCES, WORKERS, compare, weights
from tests.tiny_vllm import hold

SHAPES = hf_shapes(ARCH)
RECEIVERS: Mapping[str, Any] = {
    "shared_memory": SharedMemoryReceiver,
    "ring": RingReceiver,
    "peers": PeerReceiver,
    "files": FileReceiver,
}


class Engine:
    """Two workers with the real receivers, and nothing of vLLM."""

    def __init__(self, pool: ThreadPoolExecutor, dies: bool = False) -> None:
        self.pool, self.dies = pool, dies
        self.receivers: dict[int, Any] = {}
        self.storages: dict[int, dict[str, Tensor]] = {}

    def target(self) -> Target:
        return Target(host_identity(), tuple(WORKERS), DTYPES)

    def update_weights_soon(self, update: Update, version: int) -> "Future[list[dict[str, Any]]]":
        return self.pool.submit(self.update, update)

    def update(self, update: Update) -> list[dict[str, Any]]:
        if self.dies:
            raise RuntimeError("engine 1 was killed by SIGKILL")
        return list(self.pool.map(self.take, range(2), update))

    def take(self, worker: int, part: dict[str, Any]) -> dict[str, Any]:
        place = segment(WORKERS[worker], DTYPES)
        assert part["digest"] == place.digest
        known = self.receivers.get(worker)
        if known is None or not known.serves(part["details"]):
            known = self.receivers[worker] = RECEIVERS[part["transport"]](WORKERS[worker], place, part["details"])
        self.storages[worker] = {name: storage.clone() for name, storage in known.storages()}
        return {"bytes_received": known.received}


def senders(route: Route, held: Mapping[int, Mapping[str, Tensor]]) -> list[Sender]:
    return [Sender(rank, SOURCES, lambda name, rank=rank: held[rank][name], route) for rank in SOURCES]


def push(pool: ThreadPoolExecutor, ranks: list[Sender], route: Route, engines: list[Engine]) -> list[Any]:
    """What `trainers.stages.push_weights` does through a worker group: outcomes of the ranks, then of the engines."""
    updates = route.updates(receipt for rank in ranks for receipt in rank.prepare())
    taking = [route.start(engine, update, 1) for engine, update in zip(engines, updates, strict=True)]
    sending = [pool.submit(rank.send) for rank in ranks]
    return [future.exception(60) or future.result() for future in (*sending, *taking)]


@pytest.mark.parametrize("transport", RECEIVERS)
def test_every_engine_gets_what_it_stores_and_nothing_else(transport: str, tmp_path: Path) -> None:
    held: dict[int, dict[str, Tensor]] = {}
    with ThreadPoolExecutor(24) as pool:
        engines = [Engine(pool), Engine(pool)]
        route = choose_route(
            [Standpoint.here()] * 8,
            [e.target() for e in engines],
            SHAPES,
            transport,
            bucket_bytes=SMALL,
            directory=str(tmp_path),
        )
        ranks = senders(route, held)
        for seed in (1, 2):
            tensors = weights(seed)
            held |= {rank: hold(layout, tensors) for rank, layout in SOURCES.items()}
            outcomes = push(pool, ranks, route, engines)
            for destination in range(4):
                compare(engines[destination // 2].storages[destination % 2], tensors, destination)
            received = sum(report["bytes_received"] for reports in outcomes[8:] for report in reports)
            assert route.stored == sum(2 * piece.numel for layout in WORKERS for piece in layout) * 2
            overhead = (
                1.5 if transport in ("peers", "files") else 1.0
            )  # tiny boxes: 8 bytes of checksum for every few of weight
            assert route.stored <= received <= overhead * route.stored
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("transport", ["ring", "peers"])
def test_a_dead_engine_fails_the_push_at_once_and_the_next_route_does_without_it(transport: str) -> None:
    tensors = weights(3)
    held = {rank: hold(layout, tensors) for rank, layout in SOURCES.items()}
    with ThreadPoolExecutor(24) as pool:
        engines = [Engine(pool), Engine(pool, dies=True)]
        route = choose_route(
            [Standpoint.here()] * 8, [e.target() for e in engines], SHAPES, transport, bucket_bytes=SMALL
        )
        ranks = senders(route, held)
        outcomes = push(pool, ranks, route, engines)
        assert any(isinstance(o, TransferError) and ("SIGKILL" in str(o) or "is gone" in str(o)) for o in outcomes[:8])
        assert isinstance(outcomes[8], TransferError) and "SIGKILL" in str(outcomes[9])
        for rank in ranks:
            rank.close()
        route = choose_route([Standpoint.here()] * 8, [engines[0].target()], SHAPES, transport, bucket_bytes=SMALL)
        ranks = senders(route, held)
        push(pool, ranks, route, engines[:1])
        for worker in range(2):
            compare(engines[0].storages[worker], tensors, worker)
        for rank in ranks:
            rank.close()


def test_the_transport_follows_from_the_hosts() -> None:
    here, away = Standpoint.here(), replace(Standpoint.here(), host="elsewhere")
    near, far = Target(here.host, tuple(WORKERS), DTYPES), Target("elsewhere", tuple(WORKERS), DTYPES)
    assert choose_route([here, here], [near, near], SHAPES).transport == "shared_memory"
    assert choose_route([here, here], [near, far], SHAPES).transport == "peers"
    assert choose_route([here, away], [near], SHAPES).transport == "peers"
    assert choose_route([here], [near], SHAPES, "ring").transport == "ring"
    assert choose_route([here, away], [far], SHAPES, "files", directory="/shared").place.startswith("/shared/")
    mine = replace(near, colocated=True)
    assert choose_route([here], [mine, mine], SHAPES, backend="nccl").transport == "cuda_ipc"
    assert choose_route([here], [mine, near], SHAPES, backend="nccl").transport == "shared_memory"
    with pytest.raises(UserError, match="cuda_ipc needs GPUs"):
        choose_route([here], [mine], SHAPES, "cuda_ipc")
    beside = replace(far, colocated=True)  # on the ranks' own GPUs, where NCCL has no second member
    meetings = [choose_route([here, away], [engine], SHAPES, backend="nccl").place for engine in (far, beside)]
    assert [place.backend for place in meetings if isinstance(place, Meeting)] == ["nccl", "gloo"]
    with pytest.raises(UserError, match=r"weight_transport=shared_memory.*2 hosts.*auto, peers or files"):
        choose_route([here], [far], SHAPES, "shared_memory")


@pytest.mark.parametrize("transport", RECEIVERS)
def test_with_check_every_n_each_slice_is_checked_in_one_of_n_pushes(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(box: Tensor) -> int:
        calls.append(1)
        return checksum(box)

    for module in ("transport_shm", "transport_ring", "messages"):
        monkeypatch.setattr(f"megatron_dapo.resharding.{module}.checksum", counted)
    tensors = weights(5)
    held = {rank: hold(layout, tensors) for rank, layout in SOURCES.items()}
    with ThreadPoolExecutor(24) as pool:
        totals = []
        for every in (1, 3):
            calls.clear()
            engine = Engine(pool)
            route = choose_route(
                [Standpoint.here()] * 8,
                [engine.target()],
                SHAPES,
                transport,
                check_every=every,
                directory=str(tmp_path),
            )
            ranks = senders(route, held)
            for _ in range(every):
                before = len(calls)
                push(pool, ranks, route, [engine])
                assert len(calls) - before < 500 / every
            totals.append(len(calls))
            compare(engine.storages[0], tensors, 0)
            for rank in ranks:
                rank.close()
        assert totals[0] == totals[1] > 50


def engine_of(**changes: object) -> Target:
    layouts: list[Layout] = rollout_layouts(Architecture.from_hf(CONFIG | changes), 2)
    return Target(host_identity(), tuple(layouts), dict.fromkeys((p.param for x in layouts for p in x), "bfloat16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 2}, r"does not store model\.layers\.0\.mlp\.experts\.2\.gate_proj\.weight \(and 11 more\)"),
        ({"num_experts": 8}, r"lacks, model\.layers\.0\.mlp\.experts\.4\..*another config\.json"),
        ({"num_hidden_layers": 1}, r"does not store model\.layers\.1\.input_layernorm\.weight"),
        (
            {"vocab_size": 67},
            r"model\.embed_tokens\.weight has shape \(131, 16\).*and \(67, 16\) in the rollout engine",
        ),
        ({"tie_word_embeddings": True}, r"does not store lm_head\.weight:"),
    ],
)
def test_an_engine_of_another_config_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose_route([Standpoint.here()], [engine_of(), engine_of(**changes)], SHAPES)


def test_a_dtype_without_a_cast_is_refused() -> None:
    engine = engine_of()
    quantized = replace(engine, dtypes={**engine.dtypes, "model.norm.weight": "float8_e4m3fn"})
    with pytest.raises(PlanError, match=r"keeps model\.norm\.weight as float8_e4m3fn.*without quantization"):
        choose_route([Standpoint.here()], [quantized], SHAPES)
    other = replace(engine, dtypes={**engine.dtypes, "model.norm.weight": "float32"})
    with pytest.raises(PlanError, match=r"rollout\.dtype"):
        choose_route([Standpoint.here()], [engine, other], SHAPES)


def test_tensors_that_travel_whole_are_told(caplog: pytest.LogCaptureFixture) -> None:
    choose_route([Standpoint.here()], [replace(engine_of(), whole=("model.norm.weight",))], SHAPES)
    assert "model.norm.weight lies in a vLLM layer that the bridge does not know" in caplog.text


def test_received_bytes_add_up_over_ranks() -> None:
    future: Future[list[dict[str, Any]]] = Future()
    future.set_result([{"bytes_received": 3}, {"bytes_received": 4}])
    assert received_bytes(future) == 7
