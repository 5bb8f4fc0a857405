"""Entry of `megatron-dapo`: finds the command, parses its words, and turns a user's errors into one paragraph."""

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_dapo import __version__
from megatron_dapo.cli.commands import COMMANDS, Command
from megatron_dapo.errors import UserError

MISUSE = 2  # exit code of a wrong command line or configuration


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0 if words else MISUSE
    if words[0] == "--version":
        print(f"megatron-dapo {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"megatron-dapo: there is no command `{words[0]}`.\n\n{_help()}", file=sys.stderr, end="")
        return MISUSE
    return _run(command, _parser(words[0], command).parse_intermixed_args(words[1:]))


def _run(command: Command, args: argparse.Namespace) -> int:
    try:
        return command.run(args)
    except UserError as error:
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `megatron-dapo config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"megatron-dapo {name}", description=command.help, epilog=command.example, formatter_class=_Formatter
    )
    command.arguments(parser)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, keeps the examples' lines."""


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    head = "usage: megatron-dapo COMMAND …      (megatron-dapo COMMAND --help says more)\n"
    return "\n".join([head, *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
