"""A checkpoint behind Ray Serve on loopback: greedy answers are those of the embedded engine, to the last character."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.config.evaluation import load_eval_config
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation import evaluate
from megatron_dapo.evaluation.run import GENERATIONS
from megatron_dapo.evaluation.server import ServerSource
from megatron_dapo.runtime.launcher import free_port

pytestmark = pytest.mark.slow
APP = Path(__file__).parents[2] / "launch" / "serve" / "app.py"
LOADING_S = 360


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    """The demo's model before training, with room for the AIME problems."""
    demo = Demo(tmp_path_factory.mktemp("serve"))
    write_inputs(demo)
    config = demo.init / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    return demo


@pytest.fixture(scope="module")
def server(demo: Demo):
    port = free_port()
    words = ["--port", str(port), "--kv-cache-memory-bytes", str(2**28), "--block-size", "32"]
    log = demo.directory / "serve.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(APP), str(demo.init), *words], stdout=stream, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()[-2000:]


def wait_until_it_answers(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + LOADING_S
    config = load_eval_config(["data=x", "server.api=chat"], server=True).server
    while True:
        try:
            ServerSource(url, config).close()
            return
        except UserError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)


def words(demo: Demo, *more: str) -> list[str]:
    return [f"model={demo.init}", "temperature=0", "max_tokens=12", "reward.num_workers=1", *more]


def answers(directory: Path) -> list[tuple[int, str, int]]:
    rows = pq.read_table(directory / GENERATIONS).to_pylist()
    return [(row["problem"], row["response"], row["tokens"]) for row in rows]


def test_server_and_embedded_engine_give_the_same_numbers(demo: Demo, server: str, shared_data: Path, tmp_path: Path):
    few = {"sums": (demo.data / "val.parquet", 40), "aime": (shared_data / "aime-2024.parquet", 8)}
    for name, (path, rows) in few.items():
        pq.write_table(pq.read_table(path).slice(0, rows), tmp_path / f"{name}.parquet")
    files = f"data=[{tmp_path}/sums.parquet,{tmp_path}/aime.parquet]"
    config = load_eval_config(words(demo, files, "n=1"), server=False)
    embedded = evaluate(config, tmp_path / "embedded")
    asked = evaluate(config, tmp_path / "server", server)
    assert answers(tmp_path / "embedded") == answers(tmp_path / "server")
    assert embedded["sources"] == asked["sources"] and embedded["metrics"] == asked["metrics"]
    (found,) = asked["sources"].values()
    assert 40 < found["problems"] <= 48 and found["truncated"] > 0
