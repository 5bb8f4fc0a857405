"""`megatron-dapo convert | inspect | verify`: checkpoints between Hugging Face, Megatron and GGUF, from the shell."""

import argparse
from pathlib import Path

from megatron_dapo.errors import UserError

ACTIONS = ("to-megatron", "to-hf", "gguf", "smollm2")


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="source (not for smollm2) and target")
    parser.add_argument("--like", type=Path, help="to-hf: Hugging Face directory with config.json and tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="cast to (default: as stored)")


def convert(args: argparse.Namespace) -> int:
    wanted = 1 if args.action == "smollm2" else 2
    if len(args.paths) != wanted:
        raise UserError(f"convert {args.action} takes {wanted} path(s), got {len(args.paths)}")
    if args.action == "to-hf" and args.like is None:
        raise UserError("convert to-hf needs --like DIR: a Megatron checkpoint has no config.json and no tokenizer")
    _one_rank()
    import torch

    from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
    from checkpoint_tools.gguf_to_hf import gguf_to_hf, smollm2

    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = args.paths[-1]
    if args.action == "smollm2":
        smollm2(target)
    elif args.action == "gguf":
        gguf_to_hf(args.paths[0], target, dtype=dtype or torch.float32)
    elif args.action == "to-megatron":
        hf_to_megatron(args.paths[0], target, dtype=dtype)
    else:
        megatron_to_hf(args.paths[0], target, hf_dir=args.like, dtype=dtype)
    print(f"written to {target}")
    return 0


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="Hugging Face directory or Megatron distributed checkpoint")


def inspect(args: argparse.Namespace) -> int:
    _one_rank()
    from checkpoint_tools.inspection import inspect_checkpoint

    tensors = inspect_checkpoint(args.path)
    width = max(len(tensor.name) for tensor in tensors)
    for tensor in tensors:
        shape = "×".join(map(str, tensor.shape))
        print(f"{tensor.name:<{width}}  {shape:>16}  {tensor.dtype:<9} {tensor.pieces:>3} piece(s)  {tensor.where}")
    print(f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors) / 2**20:.1f} MiB")
    return 0


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="Hugging Face directory or Megatron distributed checkpoint")
    parser.add_argument("b", type=Path, help="the other one")
    parser.add_argument("--like", type=Path, help="Hugging Face directory that says what the network is")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference that still counts as equal")


def verify(args: argparse.Namespace) -> int:
    """Exit code 1 where the two differ by more than the tolerance."""
    _one_rank()
    from checkpoint_tools.verify import compare

    found = list(compare(args.a, args.b, hf_dir=args.like))
    wrong = [d for d in found if d.largest is None or d.largest > args.tolerance]
    for difference in wrong:
        what = f"{difference.shape_a} and {difference.shape_b}" if difference.largest is None else difference.largest
        print(f"{difference.name}: {what}")
    largest = max((d.largest for d in found if d.largest is not None), default=0.0)
    print(f"{len(found)} tensors, {len(wrong)} differ; largest difference {largest:.3g}")
    return 1 if wrong else 0


def _one_rank() -> None:
    """The tools run on any number of ranks; from the shell they run on one."""
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    from megatron_dapo.parallel.groups import init_distributed
    from megatron_dapo.parallel.topology import Topology

    init_distributed(Topology(world=1), seed=0)
