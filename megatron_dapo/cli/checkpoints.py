"""`megatron-dapo convert | inspect | verify`: checkpoints between Hugging Face, Megatron and GGUF, from the shell."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.errors import UserError

SHARED, ALONE = ("to-megatron", "to-hf"), ("dequantize", "quantize", "gguf", "smollm2")  # work of all ranks, of one


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=(*SHARED, *ALONE))
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="source (not for smollm2) and target")
    parser.add_argument("--like", type=Path, help="to-hf: Hugging Face directory with config.json and tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="cast to (default: as stored)")
    parser.add_argument("--threads", type=int, default=2, help="to-megatron: files written at a time by each rank")


def convert(args: argparse.Namespace) -> int:
    wanted = 1 if args.action == "smollm2" else 2
    if len(args.paths) != wanted:
        raise UserError(f"convert {args.action} takes {wanted} path(s), got {len(args.paths)}")
    if args.action == "to-hf" and args.like is None:
        raise UserError("convert to-hf needs --like DIR: a Megatron checkpoint has no config.json and no tokenizer")
    if args.action in ALONE and not _first_rank():
        return 0  # all would write to the same place
    if args.action in SHARED:
        _join_world()
    import torch

    from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
    from checkpoint_tools.gguf_to_hf import gguf_to_hf, smollm2
    from checkpoint_tools.quantize import dequantize, quantize

    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = args.paths[-1]
    if args.action == "smollm2":
        smollm2(target)
    elif args.action == "gguf":
        gguf_to_hf(args.paths[0], target, dtype=dtype or torch.float32)
    else:
        source = args.paths[0]
        with progress_bar() as progress:
            if args.action == "to-megatron":
                hf_to_megatron(source, target, dtype=dtype, threads=args.threads, progress=progress)
            elif args.action == "to-hf":
                megatron_to_hf(source, target, hf_dir=args.like, dtype=dtype, progress=progress)
            elif args.action == "dequantize":
                dequantize(source, target, dtype=dtype or torch.bfloat16, progress=progress)
            else:
                quantize(source, target, progress=progress)
    if _first_rank():
        print(f"written to {target}")
    return 0


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """What a conversion tells of itself, as a bar on the terminal (nothing where there is none, or on other ranks)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (console.is_terminal and _first_rank())) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="Hugging Face directory or Megatron distributed checkpoint")


def inspect(args: argparse.Namespace) -> int:
    _join_world()
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
    parser.add_argument(
        "--logits", type=int, default=0, metavar="N", help="also compare the logits of N random prompts"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="and those of this text")
    parser.add_argument("--logit-tolerance", type=float, default=1e-4, help="largest difference of a logit")


def verify(args: argparse.Namespace) -> int:
    """Exit code 1 where the two differ by more than the tolerance."""
    _join_world()
    from checkpoint_tools.verify import compare, compare_logits, config_of

    found = list(compare(args.a, args.b, hf_dir=args.like))
    wrong = [d for d in found if d.largest is None or d.largest > args.tolerance]
    for difference in wrong:
        what = f"{difference.shape_a} and {difference.shape_b}" if difference.largest is None else difference.largest
        print(f"{difference.name}: {what}")
    largest = max((d.largest for d in found if d.largest is not None), default=0.0)
    print(f"{len(found)} tensors, {len(wrong)} differ; largest difference {largest:.3g}")
    if not args.logits and not args.prompt:
        return 1 if wrong else 0
    prompts = _prompts(config_of([args.a, args.b], args.like), args.logits, args.prompt)
    logits = compare_logits(args.a, args.b, prompts, hf_dir=args.like)
    print(f"{len(prompts)} prompts; largest difference of a logit {logits:.3g}")
    return 1 if wrong or logits > args.logit_tolerance else 0


def _prompts(model: Path, count: int, texts: list[str]) -> list[list[int]]:
    """Token ids: `count` random prompts, always the same ones, then `texts` in the model's own tokens."""
    import random

    from transformers import AutoTokenizer

    from megatron_dapo.models.architecture import Architecture

    draw, vocab = random.Random(0), Architecture.from_dir(model).vocab
    prompts = [[draw.randrange(vocab) for _ in range(32)] for _ in range(count)]
    if texts:
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts += [tokenizer(text).input_ids for text in texts]
    return prompts


def _join_world() -> None:
    """One rank, or the ranks that torchrun started, which share the work of a conversion."""
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    from checkpoint_tools.megatron_files import ensure_world

    ensure_world()


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
