"""Every way weights travel, from eight trainer ranks to two engines of two workers, without vLLM."""

import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.slices import Layout
from megatron_dapo.models.tables import hf_shapes, megatron_slices
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.resharding.layouts import extents, segment
from megatron_dapo.resharding.messages import ChecksumError, TransferError, from_json, messages, storage_rounds, to_json
from megatron_dapo.resharding.plan import plan
from megatron_dapo.resharding.rollout_layout import rollout_layouts
from megatron_dapo.resharding.transport_files import FilePublisher, FileReceiver, file_update
from megatron_dapo.resharding.transport_peers import (
    Meeting,
    PeerPublisher,
    PeerReceiver,
    free_port,
    peer_update,
)
from megatron_dapo.resharding.transport_ring import Ring, RingPublisher, RingReceiver
from megatron_dapo.resharding.transport_shm import SharedMemoryReceiver, WeightPublisher, weight_update
from tests.tiny_vllm import hold

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 131,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
ARCH = Architecture.from_hf(CONFIG)
TOPOLOGY = Topology(world=8, tensor=2, pipeline=2, expert=2)
SOURCES: Mapping[int, Layout] = {rank: megatron_slices(ARCH, TOPOLOGY, rank) for rank in range(8)}
WORKERS = rollout_layouts(ARCH, 2)
DESTINATIONS: Mapping[int, Layout] = {engine * 2 + rank: WORKERS[rank] for engine in range(2) for rank in range(2)}
DTYPES = dict.fromkeys((piece.param for layout in WORKERS for piece in layout), "bfloat16")
SMALL = 700  # bytes: many rounds


def weights(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in hf_shapes(ARCH).items()}


def expected(tensors: Mapping[str, Tensor], destination: int) -> dict[str, Tensor]:
    held = hold(DESTINATIONS[destination], dict(tensors))
    assert not any(t.isnan().any() for t in held.values())
    return {name: t.to(torch.bfloat16) for name, t in held.items()}


def compare(got: Mapping[str, Tensor], tensors: Mapping[str, Tensor], destination: int) -> None:
    want = expected(tensors, destination)
    assert list(got) == list(extents(DESTINATIONS[destination]))
    for name, storage in got.items():
        assert torch.equal(storage, want[name]), f"destination {destination}, {name}"


class Trainer:
    """Eight ranks that hold the current weights in float32."""

    def __init__(self) -> None:
        self.step(0)

    def step(self, seed: int) -> None:
        self.weights = weights(seed)
        self.held = {rank: hold(layout, self.weights) for rank, layout in SOURCES.items()}

    def publishers(self, make: Callable, *place: object, **options: object) -> list:
        return [
            make(
                rank,
                layout,
                lambda name, rank=rank: self.held[rank][name],
                SOURCES,
                DESTINATIONS,
                *place,
                dtypes=DTYPES,
                **options,
            )
            for rank, layout in SOURCES.items()
        ]


def test_rounds_are_bounded_and_messages_survive_json() -> None:
    place = segment(WORKERS[0], DTYPES)
    rounds = storage_rounds(place, SMALL)
    assert [param for params in rounds for param in params] == list(place.storages)
    assert all(len(params) == 1 or sum(place.storages[p].nbytes for p in params) <= SMALL for params in rounds)
    made = plan(SOURCES, DESTINATIONS)
    total = 0
    for rank in SOURCES:
        mine = [t for t in made.sends(rank) if t.destination == 0]
        sent = {r: m for r, (m, _) in messages(mine, WORKERS[0], DTYPES, rounds).items()}
        assert from_json(to_json(sent)) == sent
        total += sum(len(m.pieces) for m in sent.values())
    assert total == len(made.receives(0))


def test_shared_memory(tmp_path: Path) -> None:
    trainer = Trainer()
    publishers = trainer.publishers(WeightPublisher, f"{tmp_path}/push")
    receivers: dict[int, SharedMemoryReceiver] = {}
    for seed in (1, 2):
        trainer.step(seed)
        receipts = [receipt for publisher in publishers for receipt in publisher.write()]
        sent = [r.written for r in receipts]
        assert sum(sent) == sum(2 * piece.numel for layout in WORKERS for piece in layout)  # engines share their files
        for destination, update in enumerate(weight_update(receipts)):
            if seed == 1:
                receivers[destination] = SharedMemoryReceiver(
                    WORKERS[destination % 2], segment(WORKERS[destination % 2], DTYPES), update["details"]
                )
            assert receivers[destination].serves(update["details"])
            compare(dict(receivers[destination].storages()), trainer.weights, destination)
        assert not list(tmp_path.iterdir()), "a segment keeps its name although everybody has opened it"
    for publisher in publishers:
        publisher.close()


def test_sampled_checksums_cover_everything_in_turn(tmp_path: Path) -> None:
    publishers = Trainer().publishers(WeightPublisher, f"{tmp_path}/push", check_every=3)
    checked: list[set[int]] = []
    for _ in range(3):
        update = weight_update(receipt for publisher in publishers for receipt in publisher.write())[0]
        checked.append({i for i, _ in update["details"]["sums"]})
    assert set.union(*checked) == set(range(len(WORKERS[0])))
    assert sum(map(len, checked)) == len(WORKERS[0])


def test_ring(tmp_path: Path) -> None:
    """Two small buckets: sources and workers in lockstep, push after push, also when a push before was given up."""
    trainer = Trainer()
    publishers = trainer.publishers(RingPublisher, f"{tmp_path}/ring", bucket_bytes=SMALL)
    memory = publishers[0].memories[0]
    assert len(memory.ring.rounds) > 5
    assert memory.ring.slot_bytes <= 2 * 4096
    receivers: dict[int, RingReceiver] = {}

    def receive(destination: int, details: Mapping, stop: bool) -> dict[str, Tensor]:
        layout = DESTINATIONS[destination]
        if destination not in receivers:
            receivers[destination] = RingReceiver(layout, segment(layout, DTYPES), details)
        assert receivers[destination].serves(details)
        got = {}
        for name, storage in receivers[destination].storages():
            got[name] = storage.clone()
            if stop:
                break
        return got

    with ThreadPoolExecutor(len(SOURCES) + len(DESTINATIONS)) as pool:
        for seed in (1, 2, 3):
            trainer.step(seed)
            given_up = seed == 2
            for publisher in publishers:
                publisher.timeout = 1.0 if given_up else 60.0
            updates = publishers[0].update()
            coming = {d: pool.submit(receive, d, updates[d]["details"], given_up) for d in DESTINATIONS}
            sending = [pool.submit(p.send) for p in publishers]
            if given_up:
                with pytest.raises(TransferError, match=r"no progress|is gone"):
                    [f.result(30) for f in sending]
                for future in sending:
                    future.exception(30)
                receivers.clear()  # the engine is started anew
                continue
            assert sum(f.result(30) for f in sending) == sum(
                2 * p.numel for layout in DESTINATIONS.values() for p in layout
            )
            for destination, storages in coming.items():
                compare(storages.result(30), trainer.weights, destination)
            assert not list(tmp_path.iterdir())
    for publisher in publishers:
        publisher.close()


def test_ring_with_slots_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots in memory of the worker, as on a GPU; the file has counters and checksums only."""
    trainer = Trainer()
    layout = {0: DESTINATIONS[0]}
    ring = Ring.of(layout[0], segment(layout[0], DTYPES), len(SOURCES), SMALL)
    slots = torch.empty(ring.slots_bytes, dtype=torch.uint8)
    publishers = [
        RingPublisher(
            rank,
            own,
            trainer.held[rank].__getitem__,
            SOURCES,
            layout,
            f"{tmp_path}/ring",
            dtypes=DTYPES,
            bucket_bytes=SMALL,
            slots={0: slots},
        )
        for rank, own in SOURCES.items()
    ]
    assert publishers[0].files[0].bytes.numel() == ring.header_bytes
    monkeypatch.setattr("megatron_dapo.resharding.transport_ipc._exported", [slots])
    with ThreadPoolExecutor(len(SOURCES)) as pool:
        details = publishers[0].update()[0]["details"]
        sending = [pool.submit(p.send) for p in publishers]
        receiver = RingReceiver(layout[0], segment(layout[0], DTYPES), details)
        compare({name: t.clone() for name, t in receiver.storages()}, trainer.weights, 0)
        [f.result(30) for f in sending]


def test_a_dead_ring_worker_is_noticed(tmp_path: Path) -> None:
    publishers = Trainer().publishers(RingPublisher, f"{tmp_path}/ring", bucket_bytes=SMALL)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for memory in publishers[0].memories.values():
        memory.worker[0] = dead.pid
        memory.taken[0] = -1
    with pytest.raises(TransferError, match="rollout worker of destination 0 is gone"):
        publishers[0].send()


def test_files(tmp_path: Path) -> None:
    trainer = Trainer()
    publishers = trainer.publishers(FilePublisher, tmp_path / "weights", bucket_bytes=SMALL)
    for seed in (1, 2):
        trainer.step(seed)
        updates = file_update(receipt for publisher in publishers for receipt in publisher.write())
        assert len(updates) == 4
        for destination, update in enumerate(updates):
            place = segment(DESTINATIONS[destination], DTYPES)
            assert update["digest"] == place.digest
            compare(
                dict(FileReceiver(DESTINATIONS[destination], place, update["details"]).storages()),
                trainer.weights,
                destination,
            )
        assert len(list((tmp_path / "weights").iterdir())) == sum(len(u["details"]["paths"]) for u in updates)
    for publisher in publishers:
        publisher.close()
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    publishers = Trainer().publishers(FilePublisher, tmp_path, bucket_bytes=SMALL)
    update = file_update(receipt for publisher in publishers for receipt in publisher.write())[0]
    path = Path(update["details"]["paths"][0])
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[content.index(b"\n") + 3] ^= 64
        path.write_bytes(content)
    elif damage == "short":
        path.write_bytes(content[:-20])
    else:
        path.unlink()
    error = {"flipped": ChecksumError, "short": OSError, "gone": FileNotFoundError}[damage]
    with pytest.raises(error, match="damaged" if damage == "flipped" else path.name):
        dict(FileReceiver(WORKERS[0], segment(WORKERS[0], DTYPES), update["details"]).storages())


def meeting(**changes: object) -> Meeting:
    return Meeting("127.0.0.1", free_port(), "push", len(SOURCES), len(DESTINATIONS), bucket_bytes=SMALL, **changes)


def test_peers() -> None:
    trainer = Trainer()
    place = meeting()
    publishers = trainer.publishers(PeerPublisher, place)
    updates = peer_update(place, DESTINATIONS, DTYPES)
    receivers: dict[int, PeerReceiver] = {}

    def receive(destination: int) -> dict[str, Tensor]:
        if destination not in receivers:
            layout = DESTINATIONS[destination]
            receivers[destination] = PeerReceiver(layout, segment(layout, DTYPES), updates[destination]["details"])
        assert receivers[destination].serves(updates[destination]["details"])
        return dict(receivers[destination].storages())

    with ThreadPoolExecutor(len(SOURCES) + len(DESTINATIONS)) as pool:
        for seed in (1, 2, 3):
            trainer.step(seed)
            coming = {d: pool.submit(receive, d) for d in DESTINATIONS}
            sent = list(pool.map(lambda p: p.send(), publishers))
            assert min(sent) > 0
            for destination, storages in coming.items():
                compare(storages.result(60), trainer.weights, destination)


def test_a_peer_that_leaves_ends_the_push_for_both_sides() -> None:
    trainer = Trainer()
    place = meeting(timeout_seconds=4)
    publishers = trainer.publishers(PeerPublisher, place)
    updates = peer_update(place, DESTINATIONS, DTYPES)
    taken = threading.Event()

    def leave(destination: int) -> None:
        layout = DESTINATIONS[destination]
        receiver = PeerReceiver(layout, segment(layout, DTYPES), updates[destination]["details"])
        if destination == 1:  # dies after its first storage
            next(receiver.storages())
            taken.set()
        else:
            dict(receiver.storages())

    with ThreadPoolExecutor(len(SOURCES) + len(DESTINATIONS)) as pool:
        coming = [pool.submit(leave, d) for d in DESTINATIONS]
        sending = [pool.submit(p.send) for p in publishers]
        with pytest.raises(TransferError, match=r"source \d could not complete a push"):
            for future in sending:
                future.result(60)
        assert taken.is_set()
        outcomes = [future.exception(60) for future in coming]
    assert any(isinstance(outcome, TransferError) for outcome in outcomes)
