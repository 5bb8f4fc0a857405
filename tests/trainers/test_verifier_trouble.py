"""A training step whose reward function kills its worker, hangs and raises; only the ranks behind it are stand-ins."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.config import load_config
from megatron_dapo.engine.engine import StepResult
from megatron_dapo.metrics import Metrics, compute
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.rollout.requests import Generation, GenerationRequest
from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.runtime.group import LocalWorkerGroup
from megatron_dapo.trainers import report
from megatron_dapo.trainers.bringup import build_run, read_inputs
from megatron_dapo.trainers.run import Run
from megatron_dapo.trainers.sync import sample_groups, train_on
from megatron_dapo.trainers.validation import validate
from megatron_dapo.trainers.worker import MiniBatch

RIGHT, WRONG, DIES, HANGS, RAISES = "11", "22", "33", "44", "55"
REWARD = f"""
import os, signal, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "{DIES}":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "{HANGS}":
        time.sleep(1000)
    if solution_str == "{RAISES}":
        raise ValueError("bad verifier")
    return {{"score": 1.0 if solution_str == "{RIGHT}" else -1.0, "acc": solution_str == "{RIGHT}"}}
"""
# What the engine says to the prompts of the one generation batch, and to two prompts of validation.
TRAINING = [
    [DIES, HANGS, RAISES, RIGHT, WRONG, RIGHT],
    [RAISES] * 6,
    [RIGHT] + [WRONG] * 5,
]
VALIDATION = [[RAISES, RIGHT], [WRONG, RIGHT]]


class Rank:
    """The calls of one rank: answers by the tables above, and remembers what it was to train on."""

    def __init__(self, config, tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.trained: list[MiniBatch] = []

    def hosts_engine(self) -> bool:
        return True

    def device_name(self) -> None:
        return None

    def memory(self) -> Metrics:
        return {}

    def sleep(self) -> None:
        pass

    def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        answers = []
        table = VALIDATION if requests[0].request_id.startswith("-1/") else TRAINING
        uids = list(dict.fromkeys(request.request_id.split("/")[1] for request in requests))
        for request in requests:
            _, uid, sample = request.request_id.split("/")
            ids = tuple(self.tokenizer(table[uids.index(uid)][int(sample)])["input_ids"])
            zeros = (0,) * len(ids)
            answers.append(Generation(request.request_id, ids, (-1.0,) * len(ids), "stop", None, zeros))
        return answers

    def update_actor(self, mini_batches: list[MiniBatch], *, step: int) -> list[StepResult]:
        self.trained += mini_batches
        return [StepResult({}, 1.0, 0.0) for _ in mini_batches]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    demo = Demo(tmp_path)
    write_inputs(demo)
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        "recipe=demo", "parallel.world_size=1", "parallel.expert=1", f"model.path={demo.init}",
        f"data.train_files=[{demo.data}/train.parquet]", f"data.val_files=[{demo.data}/val.parquet]",
        "data.train_batch_size=2", "data.gen_batch_size=3", "data.val_max_samples=2", "actor.ppo_mini_batch_size=2",
        "rollout.n=6", "rollout.val_kwargs.n=2", f"reward.custom_function.path={tmp_path}/reward.py",
        "reward.timeout_s=1", "trainer.log_expert_load_every=0", "trainer.logger=[]",
        f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    config = load_config(words, command="train")
    inputs = read_inputs(config)
    group = LocalWorkerGroup(Rank(config, inputs.tokenizer))
    made = build_run(config, Topology(), group, inputs, StopRequest())
    yield made
    made.reward.close()
    made.trackers.close()


def test_the_step_completes_on_what_could_be_scored_and_says_what_happened(run: Run, tmp_path: Path):
    with run.timer.stage("step"):
        groups, metrics = sample_groups(run, 1)
        metrics |= train_on(run, groups, 1)
    run.step = 1
    report.step(run, groups, metrics)

    first, third = groups
    assert [[score.acc for score in group.scores] for group in groups] == [[1, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert [one.sample for one in first.trajectories] == [3, 4, 5] and len(third.trajectories) == 6
    (mini_batch,) = run.ranks.group._worker.trained
    rows = torch.cat([micro["advantages"][:, 0] for micro in mini_batch.micro_batches])
    tokens = sum(len(one.response_ids) for group in groups for one in group.trajectories)
    assert len(rows) == 9 and mini_batch.normalizer.tokens == tokens
    # the baseline of a group is the mean of those that were scored: 1/3 and -2/3
    expected = torch.cat([standardised([1.0, -1.0, 1.0]), standardised([1.0] + [-1.0] * 5)])
    assert torch.allclose(rows.sort().values, expected.sort().values, atol=1e-4)

    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    counts = {name.rpartition("/")[2]: value for name, value in logged.items() if name.startswith("verifier/count/")}
    # one sample killed its worker, one hung, and seven raised; each was tried twice
    assert counts == {
        "scored": 18, "pooled": 18, "crashes": 2, "timeouts": 2, "errors": 14, "retries": 9, "workers_replaced": 4,
        "failed": 9, "dropped": 9,
    }  # fmt: skip
    filters = {name.rpartition("/")[2]: value for name, value in logged.items() if "filter_groups/" in name}
    assert (filters["generated"], filters["kept"], filters["failed"], filters["dropped"]) == (3, 2, 1, 0)


def standardised(rewards: list[float]) -> torch.Tensor:
    values = torch.tensor(rewards)
    return (values - values.mean()) / values.std()


def test_validation_counts_what_it_could_not_score_and_keeps_its_names(run: Run):
    got = compute(validate(run))
    assert got["val-core/math_dapo/acc/mean@2"] == (1.0 + 0.5) / 2
    assert got["val-aux/math_dapo/unscored"] == 1
    assert not any("@1" in name for name in got)
