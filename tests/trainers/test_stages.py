"""How a batch becomes mini-batches: every prompt once an epoch, whole, in an order that only the seed decides."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.config import load_config
from megatron_dapo.data.batch import ragged
from megatron_dapo.metrics import compute
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.networks import network
from megatron_dapo.resharding.push import Pushed, Route
from megatron_dapo.rollout.spec import EngineSpec
from megatron_dapo.runtime.group import LocalWorkerGroup
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.stages import Ranks, _of_critic, push_weights, routing_agreement, split_mini_batches
from megatron_dapo.trainers.worker import Worker


def batch(prompts: int = 6, n: int = 3) -> TensorDict:
    uid = torch.arange(prompts).repeat_interleave(n)
    return TensorDict({"uid": uid, "loss_mask": torch.ones(len(uid), 4, dtype=torch.bool)}, batch_size=[len(uid)])


def prompts_of(rows: TensorDict, seed: tuple[int, ...] | None) -> list[list[int]]:
    parts = split_mini_batches(rows, 2, "token-mean", 4.0, seed)
    assert all(part.normalizer.tokens == 4 * len(part.rows) == 24 for part in parts)
    return [sorted(set(rows["uid"][part.rows].tolist())) for part in parts]


def test_in_order_without_a_seed():
    assert prompts_of(batch(), None) == [[0, 1], [2, 3], [4, 5]]


def test_shuffled_groups_stay_whole_and_the_seed_decides():
    first, again = prompts_of(batch(), (42, 1, 0)), prompts_of(batch(), (42, 1, 0))
    assert first == again and sorted(uid for part in first for uid in part) == [0, 1, 2, 3, 4, 5]
    orders = {str(prompts_of(batch(), (42, step, epoch))) for step in range(4) for epoch in range(2)}
    assert len(orders) > 3  # steps and epochs differ


def test_the_critic_has_micro_batches_of_its_own():
    config = load_config(
        [
            "model.path=m",
            "data.train_files=[t]",
            "algorithm.adv_estimator=gae",
            "critic.max_tokens_per_micro_batch=9000",
        ],
        command="train",
    )
    ranks = Ranks(LocalWorkerGroup(None), Dispatcher(Topology(), config.actor.max_tokens_per_micro_batch))
    assert _of_critic(ranks, config).dispatcher.max_tokens == 9000 != ranks.dispatcher.max_tokens


def test_the_routing_of_fed_response_tokens_is_compared():
    """Two prompt tokens, three of the response: the last one was never fed, and prompts do not count."""
    rollout = torch.tensor([[[9, 9]], [[9, 9]], [[0, 1]], [[2, 3]]])
    trained = torch.tensor([[[0, 1]], [[0, 1]], [[1, 0]], [[2, 0]], [[7, 7]]])
    lengths = {"prompt_length": torch.tensor([2, 2]), "response_length": torch.tensor([3, 0])}
    batch = TensorDict(lengths, batch_size=[2])
    assert routing_agreement(batch, [trained, trained[:2]]) == {}
    batch["rollout_routing"] = ragged([rollout, rollout[:1]])
    assert compute(routing_agreement(batch, [trained, trained[:2]])) == {
        f"training/moe/routing_disagreement/{name}": 0.25 for name in ("layer_0", "max", "avg")
    }


class Recorded:
    """A rank that hosts an engine, as far as a push and the engine's sleep are concerned."""

    def __init__(self, sleeps: bool):
        self.heard: list[str] = []
        engine = {
            "spec": EngineSpec("m", sleeps=sleeps),
            "sleep": lambda: self.heard.append("sleep"),
            "wake": lambda *parts: self.heard.append(f"wake {' '.join(parts)}"),
        }
        self.rollout = SimpleNamespace(**engine)

    def sleep(self) -> None:
        Worker.sleep(self)  # type: ignore[arg-type]

    def wake(self, **parts: Any) -> None:
        Worker.wake(self, **parts)  # type: ignore[arg-type]

    def prepare_push(self) -> list[Any]:
        self.heard.append("prepare")
        return []

    def push(self, update: Any, *, version: int) -> Pushed:
        self.heard.append("push")
        return Pushed(sent=1, received=1)


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_on_the_trainers_device_sleeps_until_the_push(sleeps: bool):
    """Weights are awake before they are written to, keys and values only when the push is over."""
    worker = Recorded(sleeps)
    route = Route("shared_memory", "/nowhere", {}, {}, (1,))
    ranks = replace(Ranks(LocalWorkerGroup(worker), Dispatcher(Topology(), 100), hosts=(0,)), route=route)
    ranks.sleep()
    push_weights(ranks, version=1)
    expected = ["sleep", "wake weights", "prepare", "push", "wake kv_cache"]
    assert worker.heard == (expected if sleeps else ["prepare", "push"])


def test_ranks_without_engines_are_not_asked():
    ranks = Ranks(LocalWorkerGroup(None), Dispatcher(Topology(), 100))
    ranks.sleep()
    ranks.wake("weights")


def test_the_configuration_decides_how_weights_travel(monkeypatch: pytest.MonkeyPatch):
    from megatron_dapo.trainers import start_rollouts

    monkeypatch.setattr(start_rollouts, "connect_rollout", lambda *given, **named: (given[2], named))
    words = ["rollout.weight_transport=files", "rollout.weight_check_every=5", "trainer.default_local_dir=/shared/run"]
    ranks = Ranks(LocalWorkerGroup(None), Dispatcher(Topology(), 100))
    transport, named = start_rollouts.connect(ranks, (), arch=network("demo"), config=load_config(words))  # type: ignore[misc]
    assert (transport, named) == ("files", {"check_every": 5, "directory": "/shared/run/weights"})
