"""The commands: what each is called, which words it takes, and which room does it. A room is imported when called."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_dapo.cli import checkpoints
from megatron_dapo.config import load_config, split_words, translate_verl
from megatron_dapo.config.compose import CONFIG_DIR_VARIABLE
from megatron_dapo.errors import UserError

Arguments = argparse.Namespace
Parser = argparse.ArgumentParser


@dataclass(frozen=True)
class Command:
    """`arguments` declares the words, `run` does the work and returns the exit code."""

    help: str
    arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int]
    example: str = ""


def _override_arguments(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, and groups such as recipe=demo")
    parser.add_argument(
        "--config-dir", metavar="DIR", help="a directory of your own with recipe/NAME.yaml and the like"
    )


def _use_config_dir(args: Arguments) -> None:
    if args.config_dir is not None:
        os.environ[CONFIG_DIR_VARIABLE] = args.config_dir  # the ranks compose the same configuration


def _train(args: Arguments) -> int:
    from megatron_dapo.runtime.launcher import launch, launch_driver, with_restarts

    _use_config_dir(args)
    config = load_config(args.overrides, command="train")
    start = partial(launch, "megatron_dapo.train", args.overrides, config.parallel.world_size or 1)
    if config.trainer.runtime == "ray":
        start = partial(launch_driver, "megatron_dapo.train", args.overrides)
    return with_restarts(start, config.trainer.max_restarts)


def _sft(args: Arguments) -> int:
    from megatron_dapo.runtime.launcher import launch

    _use_config_dir(args)
    config = load_config(args.overrides, command="sft")
    return launch("megatron_dapo.sft", args.overrides, config.parallel.world_size or 1)


def _config_arguments(parser: Parser) -> None:
    _override_arguments(parser)
    parser.add_argument("--for", dest="command", choices=("any", "train", "sft"), default="any",
                        help="also require what this command cannot do without")  # fmt: skip
    parser.add_argument("--from-verl", action="store_true", help="print verl's overrides in our words instead")


def _config(args: Arguments) -> int:
    if args.from_verl:
        script = [word for text in args.overrides for word in (split_words(text) if " " in text else [text])]
        translation = translate_verl(script)
        print(translation.text())
        load_config(translation.overrides)  # says on stderr what would still be wrong with them
        return 0
    _use_config_dir(args)
    print(load_config(args.overrides, command=None if args.command == "any" else args.command).to_yaml(), end="")
    return 0


def _demo_arguments(parser: Parser) -> None:
    _override_arguments(parser)
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything is written")


def _demo(args: Arguments) -> int:
    from megatron_dapo.cli.demo import run_demo

    _use_config_dir(args)
    run_demo(args.directory, args.overrides)
    return 0


def _data_arguments(parser: Parser) -> None:
    parser.add_argument("action", choices=("prepare",))
    parser.add_argument(
        "name", help="dapo-math-17k, aime-2024, gsm8k, math-500, arithmetic, reasoning-gym:TASK, or a file"
    )
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="tokenizer=DIR, max_prompt_length=N, the task's own"
    )
    parser.add_argument("--output", type=Path, default=Path("data"), help="directory to write to")
    parser.add_argument(
        "--from", dest="source", type=Path, help="a local copy of a published set, read instead of downloading"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")


def _data(args: Arguments) -> int:
    from megatron_dapo.data.prepare import prepare

    wrong = [text for text in args.options if "=" not in text]
    if wrong:
        raise UserError(f"`{wrong[0]}` is not an option: write key=value")
    options = dict(text.split("=", 1) for text in args.options)
    print(prepare(args.name, args.output, args.source, options, overwrite=args.overwrite).text())
    return 0


def _eval_arguments(parser: Parser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="model=DIR, data=FILE, and how to sample (docs/configuration.md, eval)",
    )
    parser.add_argument("--server", metavar="URL", help="ask this OpenAI-compatible server instead of an own engine")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/eval"), help="where to write; the same directory goes on"
    )


def _eval(args: Arguments) -> int:
    from megatron_dapo.config.evaluation import load_eval_config

    config = load_eval_config(args.words, server=args.server is not None)
    from megatron_dapo.evaluation import evaluate

    evaluate(config, args.output, args.server)
    return 0


def _report_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories; several are compared")
    parser.add_argument("--output", type=Path, help="the page to write (default: report.html in the first run)")


def _report(args: Arguments) -> int:
    from megatron_dapo.report import write_report

    print(write_report(args.runs, args.output))
    return 0


def _rollouts_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, help="which step (default: the newest; with --grep: all)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", dest="order", action="store_const", const="best", help="highest reward first")
    order.add_argument("--worst", dest="order", action="store_const", const="worst", help="lowest reward first")
    parser.add_argument("--grep", metavar="REGEX", help="only where prompt, response or ground truth match")
    parser.add_argument("--fate", metavar="WORD", help="only what was trained, dropped, surplus, …")
    parser.add_argument("--limit", type=int, default=10, help="how many to show; 0: all")


def _rollouts(args: Arguments) -> int:
    from megatron_dapo.report import show_rollouts

    wanted = {"step": args.step, "order": args.order, "grep": args.grep, "fate": args.fate, "limit": args.limit}
    print(show_rollouts(args.run, **wanted), end="")
    return 0


def _watch_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, here or as HOST:DIRECTORY by ssh")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")


def _watch(args: Arguments) -> int:
    from megatron_dapo.report import watch

    watch(args.run, interval=args.interval, once=args.once)
    return 0


def _moe_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--source", choices=("rollout", "training"), help="whose routing (default: the rollout's, if there)"
    )
    parser.add_argument("--step", type=int, help="which report (default: the newest)")
    parser.add_argument("--gpus", type=int, help="imagine so many GPUs (default: the run's own)")
    parser.add_argument("--gpus-per-node", type=int, help="imagine nodes of so many GPUs")


def _moe(args: Arguments) -> int:
    from megatron_dapo.metrics import moe_report

    imagined = {"gpus": args.gpus, "gpus_per_node": args.gpus_per_node}
    print(moe_report(args.run, source=args.source, step=args.step, **imagined))
    return 0


def _plan_arguments(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="key=value",
                        help="the run's overrides, device=H100, gpus=N, assume.NAME=x; or reshard …")  # fmt: skip
    parser.add_argument("--search", action="store_true", help="rank all legal layouts of this model and world")
    parser.add_argument("--limit", type=int, default=10, help="layouts that --search shows")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and seconds")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")


def _plan(args: Arguments) -> int:
    from megatron_dapo.planner.command import plan_command

    shown, works = plan_command(args.words, as_json=args.json, search=args.search, limit=args.limit, html=args.html)
    print(shown, end="")
    return 0 if works else 1


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where runs will be written")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(args: Arguments) -> int:
    from megatron_dapo.cli.doctor import doctor

    shown, works = doctor(args.directory, as_json=args.json)
    print(shown, end="")
    return 0 if works else 1


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "the whole line in minutes: data, warm start, DAPO, evaluation, Hugging Face export",
        _demo_arguments, _demo, "example: megatron-dapo demo parallel.tensor=2 parallel.expert=1",
    ),
    "train": Command(
        "train with DAPO on this machine (on several: torchrun … -m megatron_dapo.train)",
        _override_arguments, _train, "example: megatron-dapo train recipe=smollm2_135m actor.optim.lr=5e-6",
    ),
    "sft": Command(
        "supervised training on prompt/response rows, with the same engine",
        _override_arguments, _sft,
        "example: megatron-dapo sft model.path=MODEL sft.train_files=rows.parquet trainer.default_local_dir=runs/sft",
    ),
    "data": Command(
        "prepare a data set: read, remove copies, write parquet, print its card",
        _data_arguments, _data,
        "examples: megatron-dapo data prepare gsm8k\n"
        "          megatron-dapo data prepare aime-2024 --from aime-2024.parquet --output data",
    ),
    "eval": Command(
        "answer prompt files with a model or a server, and say how many answers are right",
        _eval_arguments, _eval,
        "examples: megatron-dapo eval model=runs/demo/hf data=runs/demo/data/val.parquet max_tokens=16 n=8\n"
        "          megatron-dapo eval model=DIR data=data/aime-2024.parquet --server http://host:8000",
    ),
    "report": Command(
        "write one HTML page about a run, or comparing several", _report_arguments, _report,
        "example: megatron-dapo report runs/demo",
    ),
    "rollouts": Command(
        "what the model said in a step, what it got for it, and why it was trained or not",
        _rollouts_arguments, _rollouts, "example: megatron-dapo rollouts runs/demo --step 20 --worst --limit 5",
    ),
    "watch": Command(
        "follow a run in the terminal", _watch_arguments, _watch, "example: megatron-dapo watch runs/demo",
    ),
    "moe": Command(
        "a run's expert load, and what other placements of the experts would cost",
        _moe_arguments, _moe, "example: megatron-dapo moe runs/demo --gpus 128 --gpus-per-node 8",
    ),
    "convert": Command(
        "checkpoints between Hugging Face, Megatron and GGUF",
        checkpoints.convert_arguments, checkpoints.convert,
        "examples: megatron-dapo convert smollm2 models/SmolLM2-135M-Instruct\n"
        "          megatron-dapo convert to-hf runs/demo/checkpoints/global_step_200/actor OUT --like runs/demo/hf",
    ),
    "inspect": Command(
        "every tensor of a checkpoint: shape, dtype, where it lies",
        checkpoints.inspect_arguments, checkpoints.inspect, "example: megatron-dapo inspect runs/demo/hf",
    ),
    "verify": Command(
        "compare two checkpoints tensor by tensor",
        checkpoints.verify_arguments, checkpoints.verify,
        "example: megatron-dapo verify runs/demo/hf runs/demo/checkpoints/global_step_200/actor",
    ),
    "plan": Command(
        "a run's memory, traffic and time before it starts, and the layouts that fit; or a weight push's bytes",
        _plan_arguments, _plan,
        "examples: megatron-dapo plan recipe=dapo_qwen2_5_32b\n"
        "          megatron-dapo plan --search model=qwen3-235b-a22b device=H200 gpus=128\n"
        "          megatron-dapo plan reshard model=qwen3-30b-a3b train.world=128 train.tp=4 train.pp=4 train.ep=8 "
        "rollout.tp=8 rollout.engines=16 --json",
    ),
    "doctor": Command(
        "what this machine has and misses for a run, and what that costs", _doctor_arguments, _doctor,
        "example: megatron-dapo doctor --directory /scratch/runs",
    ),
    "config": Command(
        "print the resolved configuration, or what is wrong with it",
        _config_arguments, _config,
        "examples: megatron-dapo config recipe=demo rollout.n=4\n"
        "          megatron-dapo config --from-verl 'actor_rollout_ref.rollout.n=16 trainer.nnodes=2'",
    ),
}  # fmt: skip
