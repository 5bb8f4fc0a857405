"""Makes the environment that `make` runs everything in: a venv, a pinned uv, torch for this machine, the locked rest.

Standard library only. The locks' hashes are verified, and the machine's own package sources are honoured: uv does not
read pip's settings (environment variables, pip.conf), so they are passed on. Nothing is done when nothing has changed
since the last time.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_MODEL = "vllm.model_executor.models.qwen3_moe"
VERSIONS = ((3, 11), (3, 14))  # from, below
# pip's name of a setting -> uv's environment variable, and what joins several values there
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def main() -> None:
    args = parse_args()
    venv = Path(args.venv).resolve()
    gpu = args.device == "gpu" or (args.device == "auto" and has_gpu())
    stamp = venv / ".stamp"
    wanted = fingerprint(args, gpu)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    started = time.monotonic()
    python = find_python(args.python)
    say(f"making {os.path.relpath(venv, ROOT)} for {'GPU' if gpu else 'CPU'} with {python}")
    make_venv(python, venv)
    lock = HERE / ("gpu.txt" if gpu else "cpu.txt")
    env = {**os.environ, **uv_settings(venv)}
    install_uv(venv, lock)
    if not gpu:
        install_torch_cpu(venv, env)
    uv(venv, env, "--no-deps", "--requirements", str(lock))
    for extra in args.extras.split():
        uv(venv, env, *extra_arguments(extra))
    if args.mcore:
        uv(venv, env, "--no-deps", f"megatron-core=={args.mcore}")
    uv(venv, env, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    compile_imports(venv)
    stamp.write_text(wanted)
    say(f"ready after {time.monotonic() - started:.0f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--python", default="", help="interpreter; default: the first fitting one on PATH")
    parser.add_argument("--mcore", default="", help="another release of megatron-core")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--extras", default="", help="further extras of setup.py, e.g. 'reasoning-gym trackers'")
    return parser.parse_args()


def has_gpu() -> bool:
    """A CUDA machine is one on which nvidia-smi lists a device."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def fingerprint(args: argparse.Namespace, gpu: bool) -> str:
    """Changes whenever the environment has to be made anew."""
    digest = hashlib.sha256()
    for path in (Path(__file__), HERE / "cpu.txt", HERE / "gpu.txt", ROOT / "setup.py"):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {args.python} {args.mcore} {args.extras} gpu={gpu} {ROOT}\n"


def find_python(wanted: str) -> str:
    """The first fitting interpreter on PATH, or among pyenv's (whose command on PATH may point to none of them)."""
    names = [wanted] if wanted else ["python3", "python3.11", "python3.12", "python3.13"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pyenvs = [str(path) for name in names for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    for python in [*names, *pyenvs]:
        if shutil.which(python) and VERSIONS[0] <= version_of(python) < VERSIONS[1]:
            return python
    tried = ", ".join(names)
    sys.exit(f"[env] none of {tried} is a Python from 3.11 to 3.13: install one, or name it with PYTHON=python3.12")


def version_of(python: str) -> tuple[int, ...]:
    asked = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    return tuple(int(part) for part in asked.stdout.split()) if asked.returncode == 0 else (0,)


def make_venv(python: str, venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    made = subprocess.run([python, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode:
        print((made.stderr or made.stdout).strip(), file=sys.stderr)
        sys.exit(f"[env] `{python} -m venv` failed: on Debian and Ubuntu install python3-venv")


def uv_settings(venv: Path) -> dict[str, str]:
    """pip's settings (pip.conf and PIP_* variables) in uv's words; what the user set for uv itself wins."""
    listing = subprocess.run(
        [venv / "bin/python", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    values: dict[str, list[str]] = {}
    for line in listing.stdout.splitlines():
        name, _, value = line.partition("=")
        setting = re.split(r"[.]", name)[-1]
        if setting in SETTINGS:
            values.setdefault(setting, []).extend(value.strip("'\"").replace("\\n", " ").split())
    env = {
        variable: joiner.join(dict.fromkeys(values[setting]))
        for setting, (variable, joiner) in SETTINGS.items()
        if setting in values and variable not in os.environ
    }
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's rule: all sources are equal, hashes are checked
    env.setdefault("UV_HTTP_TIMEOUT", "180")
    env.setdefault("UV_LINK_MODE", "copy" if venv.stat().st_dev != Path.home().stat().st_dev else "hardlink")
    env["VIRTUAL_ENV"] = str(venv)
    return env


def install_uv(venv: Path, lock: Path) -> None:
    """The lock's own uv, by pip, hash-checked."""
    block = re.search(r"^uv==(?:.*\\\n)*.*\n", lock.read_text(), re.MULTILINE)
    pinned = venv / "uv.txt"
    if block is None:
        sys.exit(f"[env] {lock} pins no uv: run `make lock`")
    pinned.write_text(block[0])
    run([str(venv / "bin/python"), "-m", "pip", "install", "-q", "--require-hashes", "--no-deps", "-r", str(pinned)])


def install_torch_cpu(venv: Path, env: dict[str, str]) -> None:
    """torch's CPU build is on no default index: try this machine's sources, then PyTorch's index, then any build."""
    tries = (
        ([f"{TORCH}+cpu"], env),
        ([f"{TORCH}+cpu"], {**env, "UV_INDEX": f"{env.get('UV_INDEX', '')} {TORCH_CPU_INDEX}".strip()}),
    )
    for arguments, settings in tries:
        if uv(venv, settings, "--no-deps", *arguments, check=False):
            return
    say(f"no CPU build of {TORCH} here or at {TORCH_CPU_INDEX}; taking the default build with its CUDA libraries")
    uv(venv, env, TORCH)


def compile_imports(venv: Path) -> None:
    """Bytecode of what every run imports; else each rank of a first run compiles torch and Megatron for itself."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    modules = ("megatron_dapo.trainers.sync, megatron_dapo.trainers.worker", "vllm.v1.engine.llm_engine, " + VLLM_MODEL)
    running = [
        subprocess.Popen([venv / "bin/python", "-c", f"import {names}"], env=env, stdout=-3, stderr=-3)
        for names in modules
    ]
    for one in running:
        one.wait()  # what does not import here says so, with its reason, where it is used


def extra_arguments(extra: str) -> list[str]:
    lock = HERE / f"{extra}.txt"
    return ["--no-deps", "--requirements", str(lock)] if lock.is_file() else [f"{ROOT}[{extra}]"]


def uv(venv: Path, env: dict[str, str], *arguments: str, check: bool = True) -> bool:
    command = [str(venv / "bin/uv"), "pip", "install", "--python", str(venv / "bin/python"), "--quiet", *arguments]
    return run(command, env, check)


def run(command: list[str], env: dict[str, str] | None = None, check: bool = True) -> bool:
    done = subprocess.run(command, env=env, capture_output=not check, text=True)
    if done.returncode and check:
        sys.exit(f"[env] this command failed, see above: {' '.join(command)}")
    return done.returncode == 0


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


if __name__ == "__main__":
    main()
