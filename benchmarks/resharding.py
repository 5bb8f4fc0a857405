"""What a push of weights costs: ours, against full tensors through vLLM's loader, and against vLLM's reload from disk.

Run: python benchmarks/resharding.py [--part plans|push|conversion] [--model dense|moe] [--tensor 1] [--pushes 4].
Prints seconds, bytes and memory of every way, and writes what it measured into benchmarks/results/resharding.json.
Every way runs in a process of its own with a live vLLM engine in it, in turn, on the same machine; the trainer is
played by the same process, as TP2 (dense) or TP2·EP2 (MoE) ranks.

On CPU vLLM's own reload leaves mixture-of-experts and tied models with wrong weights; only its cost is shown here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "resharding.json"
WAYS = ("shared memory", "two buckets", "peers", "files", "full tensors", "reload from disk")
PARTS = ("plans", "push", "conversion")
SIZES = {
    "dense": {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
    "moe": {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "tie_word_embeddings": False}
    | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True},
}


def write_model(kind: str, directory: str) -> None:
    """A random model in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = "qwen3_moe" if kind == "moe" else "llama"
    config = AutoConfig.for_model(family, max_position_embeddings=512, eos_token_id=1, bos_token_id=0, **SIZES[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


class Trainer:
    """The ranks of a trainer, all in this process, with their storages."""

    def __init__(self, kind: str, directory: str) -> None:
        import torch
        from safetensors.torch import load_file

        from megatron_dapo.models.architecture import Architecture
        from megatron_dapo.models.tables import hf_shapes, megatron_slices
        from megatron_dapo.parallel.topology import Topology
        from megatron_dapo.resharding.layouts import extents, index_in_storage

        arch = Architecture.from_dir(directory)
        topology = Topology(world=2, tensor=2, expert=2 if kind == "moe" else 1)
        self.directory = directory
        self.shapes = hf_shapes(arch)
        self.layouts = {rank: megatron_slices(arch, topology, rank) for rank in range(topology.world)}
        whole = load_file(f"{directory}/model.safetensors")
        self.storages: dict[int, dict[str, Any]] = {}
        for rank, layout in self.layouts.items():
            held = self.storages[rank] = {name: torch.zeros(shape) for name, shape in extents(layout).items()}
            for piece in layout:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                held[piece.param][index_in_storage(piece, piece.offset, piece.shape)] = whole[piece.tensor][box]

    def gather(self) -> Iterator[tuple[str, Any]]:
        """Every tensor in full, one after the other: what an all-gather leaves on each rank."""
        import torch

        from megatron_dapo.resharding.layouts import index_in_storage

        pieces: dict[str, list[tuple[int, Any]]] = {name: [] for name in self.shapes}
        for rank, layout in self.layouts.items():
            for piece in layout:
                pieces[piece.tensor].append((rank, piece))
        for name, parts in pieces.items():
            full = torch.empty(self.shapes[name])
            for rank, piece in parts:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                full[box] = self.storages[rank][piece.param][index_in_storage(piece, piece.offset, piece.shape)]
            yield name, full


Push = Callable[[int], Mapping[str, float]]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def make_push(way: str, trainer: Trainer, server: Any, scratch: Path) -> Push:
    """One push by this way: the version in, seconds of each side and bytes out."""
    from megatron_dapo.resharding.transport_files import FilePublisher, file_update
    from megatron_dapo.resharding.transport_peers import Meeting, PeerPublisher, free_port, peer_update
    from megatron_dapo.resharding.transport_ring import RingPublisher
    from megatron_dapo.resharding.transport_shm import WeightPublisher, weight_update

    described = server.layouts()
    destinations = {i: layout for i, (layout, _, _) in enumerate(described)}
    dtypes = described[0][1]
    sources = trainer.layouts

    def publishers(kind: type, place: object) -> list[Any]:
        return [
            kind(rank, layout, trainer.storages[rank].__getitem__, sources, destinations, place, dtypes=dtypes)
            for rank, layout in sources.items()
        ]

    def received() -> float:
        return float(sum(r["bytes_received"] for r in server.engine.collective_rpc("megatron_dapo_report")))

    if way == "two buckets":
        rings = publishers(RingPublisher, f"/dev/shm/benchmark-{os.getpid()}")

        def push_rings(version: int) -> Mapping[str, float]:
            with ThreadPoolExecutor(len(rings)) as pool:
                update = rings[0].update()
                sending = [pool.submit(p.send) for p in rings]
                seconds, _ = timed(lambda: server.update_weights(update, version))
                return {"trainer_seconds": 0.0, "worker_seconds": seconds, "bytes": sum(s.result() for s in sending)}

        return push_rings
    if way == "peers":
        meeting = Meeting("127.0.0.1", free_port(), "benchmark", len(sources), len(destinations))
        peers = publishers(PeerPublisher, meeting)

        def push_peers(version: int) -> Mapping[str, float]:
            with ThreadPoolExecutor(len(peers)) as pool:
                sending = [pool.submit(p.send) for p in peers]
                seconds, _ = timed(lambda: server.update_weights(peer_update(meeting, destinations, dtypes), version))
                sent = sum(s.result() for s in sending)
            return {"trainer_seconds": 0.0, "worker_seconds": seconds, "bytes": sent}

        return push_peers
    if way in ("shared memory", "files"):
        place: object = f"/dev/shm/benchmark-{os.getpid()}" if way == "shared memory" else scratch / "weights"
        ranks = publishers(WeightPublisher if way == "shared memory" else FilePublisher, place)
        join: Callable = weight_update if way == "shared memory" else file_update

        def push(version: int) -> Mapping[str, float]:
            writing, receipts = timed(lambda: [receipt for p in ranks for receipt in p.write()])
            loading, _ = timed(lambda: server.update_weights(join(receipts), version))
            return {"trainer_seconds": writing, "worker_seconds": loading, "bytes": received()}

        return push
    return make_baseline(way, trainer, server, scratch, len(destinations))


def make_baseline(way: str, trainer: Trainer, server: Any, scratch: Path, workers: int) -> Push:
    """Full tensors to every worker: through shared memory, or as a safetensors file."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    size = 4 * sum(int(np.prod(shape)) for shape in trainer.shapes.values())
    path = f"/dev/shm/benchmark-full-{os.getpid()}"

    def push_full(version: int) -> Mapping[str, float]:
        def write() -> list:
            with open(path, "ab") as file:
                file.truncate(size)
            memory = torch.from_file(path, shared=True, size=size // 4, dtype=torch.float32)
            entries, end = [], 0
            for name, full in trainer.gather():
                memory[end : end + full.numel()] = full.view(-1)
                entries.append((name, list(full.shape), end))
                end += full.numel()
            return entries

        writing, entries = timed(write)
        loading, _ = timed(lambda: server.engine.collective_rpc("baseline_full", args=(path, entries)))
        os.unlink(path)
        return {"trainer_seconds": writing, "worker_seconds": loading, "bytes": float(size * workers)}

    def push_disk(version: int) -> Mapping[str, float]:
        writing, _ = timed(lambda: save_file(dict(trainer.gather()), f"{trainer.directory}/model.safetensors"))
        loading, _ = timed(lambda: server.engine.collective_rpc("baseline_disk", args=(trainer.directory,)))
        return {"trainer_seconds": writing, "worker_seconds": loading, "bytes": float(size * workers)}

    return push_full if way == "full tensors" else push_disk


class Memory:
    """Peak memory of this process and its children, sampled."""

    def __init__(self) -> None:
        self.peak = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.stop.wait(0.01):
            self.peak = max(self.peak, resident(os.getpid()))

    def __enter__(self) -> "Memory":
        self.start = resident(os.getpid())
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join()


def resident(pid: int) -> int:
    """Bytes of a process and its children; a page that several mappings share counts in equal parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return own * 1024 + sum(resident(int(child)) for child in children)


def run_way(way: str, kind: str, tensor: int, pushes: int, directory: str) -> None:
    """In a process of its own: start vLLM, push several times, print the figures as a line of JSON."""
    from megatron_dapo.rollout.server import Server
    from megatron_dapo.rollout.spec import EngineSpec

    own = {"worker_extension_cls": "benchmarks.resharding_baseline.Baseline"}
    spec = EngineSpec(directory, max_model_len=256, kv_cache_gb=0.125, tensor_parallel_size=tensor, engine_kwargs=own)
    server = Server(spec)
    trainer = Trainer(kind, directory)
    push = make_push(way, trainer, server, Path(directory))
    rounds = []
    with Memory() as memory:
        for version in range(1, pushes + 1):
            rounds.append(push(version))
    steady = rounds[1:] or rounds  # the first push maps and touches its memory
    best = min(steady, key=lambda r: r["trainer_seconds"] + r["worker_seconds"])
    first = rounds[0]["trainer_seconds"] + rounds[0]["worker_seconds"]
    total = best["trainer_seconds"] + best["worker_seconds"]
    extra = (memory.peak - memory.start) / 2**20
    print("RESULT", json.dumps(dict(best) | {"seconds": total, "first_seconds": first, "peak_extra_mib": extra}))
    sys.stdout.flush()
    server.engine.engine_core.shutdown()
    os._exit(0)


def plans() -> dict[str, Any]:
    """Planning two large models: 16 x 8 trainer ranks (TP4, PP4, EP8) to 16 engines of TP8."""
    from megatron_dapo.planner.reshard import plan_reshard

    layout = ["train.world=128", "train.tp=4", "train.pp=4", "train.ep=8", "rollout.tp=8", "rollout.engines=16"]
    found = {}
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        start = time.process_time()
        made = plan_reshard([f"model={name}", *layout])
        seconds = time.process_time() - start
        found[name] = {
            "plan_seconds": made.plan_seconds,
            "layout_seconds": made.layout_seconds,
            "cpu_seconds_in_all": seconds,
            "transfers": made.stats.transfers,
            "ratio_to_lower_bound": made.stats.ratio,
            "naive_over_moved": made.stats.naive_bytes / made.stats.bytes_moved,
            "send_max_over_mean": made.stats.send_max_over_mean,
        }
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    return found


def measure(way: str, kind: str, tensor: int, pushes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        write_model(kind, directory)
        command = [sys.executable, str(Path(__file__)), "--way", way, "--model", kind, "--tensor", str(tensor)]
        command += ["--pushes", str(pushes), "--directory", directory]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    """Measure every way, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure (default: all)")
    parser.add_argument("--model", choices=list(SIZES), action="append")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size of the engine")
    parser.add_argument("--pushes", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.part = args.part or PARTS
    if args.way:
        from megatron_dapo.rollout.spec import EngineSpec, environment

        os.environ.update(environment(EngineSpec("", tensor_parallel_size=args.tensor), True, os.environ))
        run_way(args.way, args.model[0], args.tensor, args.pushes, args.directory)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "plans" in args.part:
        results["plans"] = plans()
    for kind in args.model or list(SIZES):
        if "push" in args.part:
            results[f"{kind}-tp{args.tensor}"] = pushes(kind, args.tensor, args.pushes)
        if "conversion" in args.part:
            results[f"conversion-{kind}"] = conversion(kind)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"saved in {RESULTS.relative_to(ROOT)}")


def pushes(kind: str, tensor: int, count: int) -> dict[str, Any]:
    """Every way to an engine of `tensor` ranks, and how each compares with shared memory."""
    table = {way: measure(way, kind, tensor, count) for way in WAYS}
    ours = table["shared memory"]
    print(f"{kind}, engine of TP{tensor}:")
    for way, row in table.items():
        row["seconds_over_ours"] = row["seconds"] / ours["seconds"]
        row["bytes_over_ours"] = row["bytes"] / ours["bytes"]
        print(
            f"  {way:17s} {row['seconds']:.3f} s (trainer {row['trainer_seconds']:.3f}, worker "
            f"{row['worker_seconds']:.3f}; first {row['first_seconds']:.3f})  {row['bytes'] / 2**20:6.0f} MiB  "
            f"x{row['seconds_over_ours']:.2f} time  x{row['bytes_over_ours']:.2f} bytes  "
            f"+{row['peak_extra_mib']:.0f} MiB at the peak"
        )
    return table


def conversion(kind: str) -> dict[str, Any]:
    """Both directions between the checkpoint formats against `cp`."""
    from benchmarks.conversion import measure as measure_conversion

    with tempfile.TemporaryDirectory() as directory:
        write_model(kind, directory)
        found = measure_conversion(directory)
    print(f"{kind}, {found['weights_mib']:.0f} MiB, largest layer {found['largest_layer_mib']:.0f} MiB:")
    print(f"  cp           {found['cp_seconds']:.2f} s")
    for way in ("to-megatron", "to-hf"):
        row = found[way]
        print(
            f"  {way:12s} {row['seconds']:.2f} s  x{row['seconds_over_cp']:.2f} of cp  +{row['peak_mib']:.0f} MiB at "
            f"the peak, x{row['peak_over_layer']:.2f} of the largest layer"
        )
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
