"""Reward models: a real (tiny) sequence classifier, and a pooling server on loopback."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from megatron_dapo.config.sampling import RewardConfig
from megatron_dapo.data.tokenizer import train_tokenizer
from megatron_dapo.data.types import Prompt, Trajectory
from megatron_dapo.rewards import RewardError, RewardManager
from megatron_dapo.rewards.model import Classifier, PoolingServer


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    tokenizer = train_tokenizer(["Answer: 5"] * 5, path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, num_labels=1, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    return path


CONVERSATION = ({"role": "user", "content": "2+3=?"},)


def test_a_batch_scores_as_its_rows_do(classifier):
    model = Classifier(str(classifier))
    responses = ["Answer: 5", "5", "I think that it is five", ""] * 6
    together = model.score([CONVERSATION] * len(responses), responses)
    alone = [model.score([CONVERSATION], [response])[0] for response in responses]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 5) for score in together}) == 4


def one(manager, tokenizer, text):
    prompt = Prompt("0-0-0", 0, 0, 0, (1,), CONVERSATION, "math_dapo", "5")
    ids = tuple(tokenizer(text)["input_ids"])
    trajectory = Trajectory("0-0-0", 0, ids, (0.0,) * len(ids), "stop", (0,) * len(ids))
    return manager.score([prompt], [trajectory])[0]


def test_it_is_mixed_into_the_reward_by_its_weight(classifier):
    model = Classifier(str(classifier))
    config = RewardConfig.model_validate({"reward_model": {"enable": True, "path": str(classifier), "weight": 0.5}})
    with RewardManager(config, model.tokenizer, 64) as manager:
        score = one(manager, model.tokenizer, "Answer: 5")
    added = model.score([CONVERSATION], ["Answer: 5"])[0]
    assert (score.raw, score.acc, score.extra["reward_model"]) == (1.0, 1.0, pytest.approx(added, abs=1e-6))
    assert score.reward == pytest.approx(1.0 + 0.5 * added)


def test_the_rule_has_a_weight_of_its_own(classifier):
    settings = {"rule_weight": 0.25, "reward_model": {"enable": True, "path": str(classifier), "weight": 2.0}}
    model = Classifier(str(classifier))
    with RewardManager(RewardConfig.model_validate(settings), model.tokenizer, 64) as manager:
        score = one(manager, model.tokenizer, "Answer: 5")
    assert (score.raw, score.acc) == (1.0, 1.0)
    assert score.reward == pytest.approx(0.25 + 2.0 * model.score([CONVERSATION], ["Answer: 5"])[0])
    with RewardManager(RewardConfig(rule_weight=0.5), model.tokenizer, 64) as manager:
        assert one(manager, model.tokenizer, "Answer: 4").reward == -0.5


def test_an_offloaded_classifier_is_on_its_device_only_while_it_scores(classifier, monkeypatch):
    """Where the parameters are sent, without a GPU: there and back, also after an error."""
    model = Classifier(str(classifier), offload=True)
    monkeypatch.setattr(model, "device", "cuda")
    places = []
    monkeypatch.setattr(model.model, "to", places.append)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), model._present():
            1 / 0  # noqa: B018
    assert places == ["cuda", "cpu"] * 2


def test_a_server_cannot_be_offloaded():
    settings = {"reward_model": {"enable": True, "path": "http://127.0.0.1:1", "offload_param": True}}
    with pytest.raises(RewardError, match="offload_param"):
        RewardManager(RewardConfig.model_validate(settings), None, 64)


def test_a_directory_that_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(RewardError, match="is no sequence classifier"):
        Classifier(str(tmp_path))


class Handler(BaseHTTPRequestHandler):
    """Answers as a pooling server does: the longer the response, the higher; the first try of "flaky" fails."""

    seen: list[str] = []  # noqa: RUF012 - shared on purpose

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response = body["messages"][-1]["content"]
        self.seen.append(response)
        broken = response == "broken" or (response == "flaky" and self.seen.count("flaky") == 1)
        self.send_response(500 if broken else 200)
        self.end_headers()
        if not broken:
            self.wfile.write(json.dumps({"data": [{"probs": [len(response) / 100]}]}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_real_vllm_pooling_server_agrees_with_the_classifier(tmp_path):
    pytest.importorskip("vllm")
    tokenizer = train_tokenizer(["Answer: 5"] * 5, tmp_path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + -len(tokenizer) % 64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, intermediate_size=64, num_labels=1, pad_token_id=0, eos_token_id=1,
        max_position_embeddings=256,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).float().save_pretrained(tmp_path)
    responses = ["Answer: 5", "5", "I think that it is five"]
    with served(tmp_path) as url:
        remote = PoolingServer(url).score([CONVERSATION] * 3, responses)
    assert remote == pytest.approx(Classifier(str(tmp_path)).score([CONVERSATION] * 3, responses), abs=1e-5)


@contextmanager
def served(path):
    """vLLM's server of a model directory on a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"--runner pooling --dtype float32 --enforce-eager --max-model-len 128 --host 127.0.0.1 --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), *words.split()]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    log = path / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def server():
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_a_server_is_asked_per_response_and_again_after_an_error(server):
    responses = ["a" * i for i in range(1, 20)] + ["flaky"]
    scores = PoolingServer(server).score([CONVERSATION] * 20, responses)
    assert scores == [len(response) / 100 for response in responses]


def test_a_server_that_fails_is_a_failure_and_no_score(server, classifier, monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.model.time.sleep", lambda _: None)
    tokenizer = Classifier(str(classifier)).tokenizer
    config = RewardConfig.model_validate({"reward_model": {"enable": True, "path": server}})
    with RewardManager(config, tokenizer, 64) as manager:
        score = one(manager, tokenizer, "broken")
        assert (score.status, manager.counts["failed"]) == ("failed", 1)
        assert "gave no score" in score.extra["failure"]
