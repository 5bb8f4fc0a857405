"""The whole line: four trainer ranks (TP2·PP2·EP2) push to two live vLLM engines of TP2, and one of these dies."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests import tiny_vllm as tiny

TRANSPORTS = ("shared_memory", "shared_memory", "ring", "ring", "peers")


def train_and_push(directory: str, changed: list[str], parallel: list[str], kill: bool) -> dict[str, Any] | None:
    """On every rank: a real worker, of which ranks 0 and 1 host an engine each. Rank 0 drives; returns its findings."""
    from megatron_dapo.config import load_config
    from megatron_dapo.models.architecture import Architecture
    from megatron_dapo.models.load import load_hf
    from megatron_dapo.runtime.group import TorchrunWorkerGroup, serve
    from megatron_dapo.trainers import bringup
    from megatron_dapo.trainers.worker import ACTOR, Worker

    class Trainee(Worker):
        """Learns by being told; and its engine can be hurt."""

        def adopt(self, *, directory: str) -> None:
            load_hf(self.engines[ACTOR].chunks, self.arch, self.topology, directory)

        def hurt(self, *, host: int, seconds: float) -> None:
            """Stop a worker process of the engine on rank `host` now, so that it takes no part, and kill it later."""
            if self.rank == host and self.rollout is not None:
                worker = vllm_worker(self.rollout.pid)
                os.kill(worker, signal.SIGSTOP)
                threading.Timer(seconds, os.kill, (worker, signal.SIGKILL)).start()

        def refusal(self) -> str | None:
            """Why this rank's engine does not generate, if it does not."""
            try:
                self.generate(tiny.requests(1, 1, step=99))
            except RuntimeError as error:
                return str(error)
            return None

    words = [f"model.path={directory}", "model.dtype=float32", "data.max_prompt_length=64", "rollout.engines=2"]
    words += ["data.max_response_length=32", "rollout.tensor_parallel_size=2", "rollout.kv_cache_gb=0.06"]
    config = load_config([*words, "rollout.max_num_seqs=16", *parallel])
    topology, arch = bringup.topology_of(config), Architecture.from_dir(directory)
    control = bringup.join_world(config, topology)
    assert control is not None
    worker = Trainee(config, arch, topology, bringup.rank(), total_steps=1)
    try:
        if bringup.rank() > 0:
            return serve(worker, control)
        group = TorchrunWorkerGroup(worker, control)
        found = drive(group, config, topology, arch, changed, kill)
        group.close()
        return found
    finally:
        worker.close()


def drive(group: Any, config: Any, topology: Any, arch: Any, changed: list[str], kill: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from megatron_dapo.metrics import compute
    from megatron_dapo.resharding.push import PushFailed
    from megatron_dapo.resharding.rollout_layout import rollout_layouts
    from megatron_dapo.trainers import stages
    from megatron_dapo.trainers.dispatch import Dispatcher

    hosts = (0, 1)
    ranks = stages.Ranks(group, Dispatcher(topology, 1024), hosts)
    found: dict[str, Any] = {"differences": [], "ratios": [], "versions": [], "transports": []}
    for version, (transport, directory) in enumerate(zip(TRANSPORTS, changed, strict=True), start=1):
        if ranks.route is None or ranks.route.transport != transport:
            ranks = stages.connect_rollout(ranks, arch, transport)
            assert ranks.route is not None
        group.call("adopt", directory=directory)
        metrics = compute(stages.push_weights(ranks, version))
        asked = tiny.requests(prompts=2, samples=2, step=version)
        answers = group.call("generate", [asked if rank in hosts else [] for rank in range(4)])
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
        found["differences"].append(max(tiny.worst_difference(model, asked, answers[host]) for host in hosts))
        found["ratios"].append(metrics["push/ratio_to_bound"])
        found["versions"].append({v for host in hosts for g in answers[host] for v in g.weight_versions})
    planned = [set(layout) for layout in rollout_layouts(arch, 2)]
    found["planned"] = [set(layout) for layout in ranks.route.destinations.values()] == planned * 2
    if kill:
        group.call("hurt", host=1, seconds=2.0)
        try:
            stages.push_weights(ranks, 6)
        except PushFailed as error:
            found["failed"] = (error.engines, str(error))
        found["refusals"] = group.call("refusal")[:2]
    return found


def vllm_worker(server: int) -> int:
    """A tensor-parallel worker process below an engine's server process; vLLM gives them this title."""
    children = [c for task in Path(f"/proc/{server}/task").iterdir() for c in (task / "children").read_text().split()]
    return next(int(c) for c in children if b"VLLM::Worker" in Path(f"/proc/{c}/cmdline").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "moe",
        pytest.param("qwen2", marks=pytest.mark.long),
        pytest.param("llama", marks=pytest.mark.long),
    ],
    ids=["mixture", "dense tied", "dense untied"],
)
def test_every_push_arrives_and_a_failed_one_is_told(ranks: Any, kind: str, tmp_path: Path) -> None:
    source = tiny.model_directory(kind)
    changed = []
    for version in range(1, 6):
        directory = tmp_path / str(version)
        shutil.copytree(source, directory)
        save_file(tiny.changed(tiny.weights(kind), version), directory / "model.safetensors", metadata={"format": "pt"})
        changed.append(str(directory))
    parallel = ["parallel.tensor=2", "parallel.pipeline=2", f"parallel.expert={2 if kind == 'moe' else 1}"]
    kill = kind == "llama"
    found = ranks.run(train_and_push, 4, source, changed, parallel, kill)[0]
    assert max(found["differences"]) <= 1e-5, found
    assert all(1.0 <= ratio <= 1.02 for ratio in found["ratios"]), found["ratios"]
    assert found["versions"] == [{version} for version in range(1, 6)]
    assert found["planned"], "rollout_layouts foresees what the engines store"
    if kill:
        engines, reason = found["failed"]
        assert 1 in engines and "rollout-1" in reason
        refusing = [engine for engine, refusal in enumerate(found["refusals"]) if refusal is not None]
        assert refusing == sorted(engines), "an engine without complete weights generates nothing"
