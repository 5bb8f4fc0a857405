"""A real update of the demo model on this host, its tensors counted by kind: `python -m tests.planner.measured full 2048 {}`."""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

from megatron_dapo.resharding.transport_peers import free_port

ROOT = Path(__file__).parents[2]


def measure(recompute: str, tokens: int, **layout: int) -> list[dict[str, int]]:
    """Bytes by kind on every rank, from processes of their own. `layout`: sizes of `parallel`, whose product they are."""
    command = [sys.executable, "-m", "tests.planner.measured", recompute, str(tokens), json.dumps(layout)]
    world = prod(layout.values())
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if world > 1 else {}
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | place | {"RANK": str(rank)}
        )
        for rank in range(world)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return [json.loads(text.splitlines()[-1]) for text in told]


def main(recompute: str, tokens: int, layout: dict[str, int]) -> dict[str, int]:
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_dapo.config.model import ModelConfig, ParallelConfig
    from megatron_dapo.config.training import OptimConfig
    from megatron_dapo.engine.optimizer import build_optimizer
    from megatron_dapo.models.build import build_model
    from megatron_dapo.models.megatron_config import transformer_config
    from megatron_dapo.parallel.groups import init_distributed
    from megatron_dapo.parallel.topology import Topology
    from megatron_dapo.planner.networks import network

    world = prod(layout.values())
    init_distributed(Topology(world=world, **layout), seed=1)
    arch, parallel = network("demo"), ParallelConfig(world_size=world, **layout)
    config = transformer_config(arch, ModelConfig(dtype="float32", recompute=recompute), parallel)
    chunk = build_model(arch, config)[0]
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.normal_(std=0.02)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, chunk)
    optimizer = build_optimizer([wrapped], OptimConfig(), torch.float32, {})
    saved = watch(chunk)
    ids = torch.randint(0, 300, (1, tokens), generator=torch.Generator().manual_seed(0))
    ends = torch.arange(0, tokens + 1, tokens // 8, dtype=torch.int32)  # eight sequences in one pack
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=tokens // 8, max_seqlen_kv=tokens // 8
    )
    wrapped(ids, None, None, packed_seq_params=packed).logsumexp(-1).mean().backward()
    wrapped.finish_grad_sync()
    optimizer.step()
    state = [value for inner in optimizer.chained_optimizers for value in tensors(inner.optimizer.state)]
    buffers = wrapped.buffers + wrapped.expert_parallel_buffers
    return {
        "parameters": sum(p.numel() * p.element_size() for p in chunk.parameters()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "optimizer": sum(t.numel() * t.element_size() for t in state if t.numel() > 1),
        "activations": sum(size for size, _ in saved.values()),
    }


def watch(chunk):
    """Every storage that the decoder saves for its backward pass, parameters aside, by address."""
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    forward = chunk.decoder.forward

    def watched(*args, **named):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **named)

    chunk.decoder.forward = watched
    return saved


def tensors(state):
    import torch

    return [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
