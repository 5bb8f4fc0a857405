"""The command line: help without heavy imports, one paragraph for a user's mistake, exit codes."""

import subprocess
import sys

import pytest

from megatron_dapo.cli.commands import COMMANDS, Command
from megatron_dapo.cli.main import main
from megatron_dapo.config import Config
from megatron_dapo.errors import UserError


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[name].help in " ".join(capsys.readouterr().out.split())


def test_help_is_light():
    code = (
        "import sys; from megatron_dapo.cli.main import main; main(['--help'])\n"
        "heavy = [m for m in ('torch', 'ray', 'vllm', 'transformers', 'hydra') if m in sys.modules]; sys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_no_command_and_an_unknown_one(capsys):
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "no command `trian`" in capsys.readouterr().err


def test_config_prints_what_can_be_read_back(capsys, tmp_path):
    assert main(["config", "recipe=demo", "rollout.n=4"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    config = Config.from_yaml(path)
    assert (config.rollout.n, config.actor.clip_ratio_high) == (4, 0.28)


def test_a_mistake_is_one_paragraph_without_traceback(capsys):
    assert main(["config", "recipe=demo", "rollout.nn=4", "actor.ppo_mini_batch_size=7"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "Traceback" not in out.err and "\n\n" not in out.err
    assert "rollout.nn" in out.err and "actor.ppo_mini_batch_size = 7" in out.err


def test_config_for_a_command_wants_its_files(capsys):
    assert main(["config", "--for", "train"]) == 2
    assert "model.path" in capsys.readouterr().err
    assert main(["config"]) == 0


def test_options_may_stand_between_overrides(capsys):
    assert main(["config", "rollout.n=4", "--for", "any", "rollout.temperature=0.5"]) == 0
    assert "temperature: 0.5" in capsys.readouterr().out


def test_from_verl(capsys):
    assert main(["config", "--from-verl", "actor_rollout_ref.rollout.n=4 \\\n  trainer.logger='[\"console\"]'"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# actor_rollout_ref.rollout.n")
    assert lines[1:] == ["rollout.n=4", "'trainer.logger=[\"console\"]'"]
    assert main(["config", "--from-verl", "actor_rollout_ref.nothing=4"]) == 2


def test_a_directory_of_ones_own_reaches_the_ranks(capsys, tmp_path, monkeypatch):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nrollout: {n: 3}\n")
    monkeypatch.setenv("MEGATRON_DAPO_CONFIG_DIR", "")  # restored afterwards: the command sets it for its children
    assert main(["config", "recipe=mine", "--config-dir", str(tmp_path)]) == 0
    assert "n: 3" in capsys.readouterr().out
    assert main(["config", "recipe=mine"]) == 0  # as a rank would, from the environment alone


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("the disk is full: free some space"), 2), (KeyboardInterrupt(), 130)]
)
def test_how_a_command_may_end(error: BaseException, code: int, capsys, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setitem(COMMANDS, "config", Command("x", lambda parser: None, fail))
    assert main(["config"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_broken_pipe_is_quiet():
    script = f"{sys.executable} -m megatron_dapo.cli.main config recipe=demo | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("model:")
