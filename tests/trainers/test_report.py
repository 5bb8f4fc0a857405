"""What the loop tells of a step: only what has happened, under the names that are documented."""

from dataclasses import replace
from types import SimpleNamespace

from megatron_dapo.config import load_config
from megatron_dapo.data.batch import to_batch
from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.metrics import Max, Timer, compute
from megatron_dapo.metrics.names import undocumented
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.runtime.group import LocalWorkerGroup
from megatron_dapo.trainers import report
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.stages import Ranks
from megatron_dapo.trainers.validation import validate
from tests.trainers.test_expert_load import ARCH

PROMPT = Prompt("0-1-0", 0, 1, 0, (5, 6), ({"role": "user", "content": "1+1=?"},), "math", "2")


def trajectory(sample: int, length: int = 3, reason: str = "stop") -> Trajectory:
    return Trajectory(PROMPT.uid, sample, (7,) * length, (-0.5,) * length, reason, (0,) * length)


def score(acc: float) -> Score:
    return Score(reward=acc, raw=acc, acc=acc)


def run_of(*settings: str, **parts) -> SimpleNamespace:
    config = load_config(["model.path=m", "data.train_files=[t]", *settings], command="train")
    ranks = Ranks(LocalWorkerGroup(None), Dispatcher(Topology(), config.actor.max_tokens_per_micro_batch))
    dump = SimpleNamespace(trained=lambda batch, groups: None)
    return SimpleNamespace(config=config, ranks=ranks, dump=dump, **parts)


def told(run: SimpleNamespace, *trajectories: Trajectory) -> dict[str, float]:
    group = Group(PROMPT, trajectories, tuple(score(i % 2) for i in range(len(trajectories))))
    values = compute(report.batch_metrics(run, to_batch([group], 0), [group]))
    assert not undocumented(values)
    return values


def test_speculation_is_told_by_the_requests_that_know_theirs():
    drafted = replace(trajectory(0), speculation=(4, 3, 2))
    found = told(run_of(), drafted, trajectory(1))
    assert found["rollout/spec_accept_rate"] == 0.75 and found["rollout/spec_accept_length"] == 2.5
    assert not any(name.startswith("rollout/") for name in told(run_of(), trajectory(0), trajectory(1)))


def test_turns_are_told_where_there_can_be_several():
    talked = replace(trajectory(0), turns=3, tool_calls=2)
    several = run_of("rollout.agent.name=calculator", "rollout.agent.max_turns=4", "trainer.mode=colocate_async")
    found = told(several, talked, trajectory(1))
    assert found["num_turns/mean"] == 2 and found["tool_call_counts/max"] == 2
    assert "num_turns/mean" not in told(run_of(), trajectory(0), trajectory(1))


def test_validation_tells_lengths():
    class Prompts:
        def __len__(self):
            return 1

        def draw(self, index, epoch):
            return PROMPT

    run = run_of(
        "rollout.val_kwargs.n=2",
        "rollout.val_kwargs.do_sample=true",
        validation=Prompts(),
        timer=Timer(),
        validation_sampling=None,
        generate=lambda prompts, n, sampling, step: [[trajectory(0), trajectory(1, 5, "length")] for _ in prompts],
        reward=SimpleNamespace(score=lambda prompts, made: [score(1.0) for _ in made]),
    )
    found = compute(validate(run))
    assert not undocumented(found)
    assert found["val-aux/response_length/mean"] == 4 and found["val-aux/response_length/clip_ratio"] == 0.5


def test_a_step_tells_of_all_ranks_and_devices():
    class Ranked:
        """Four ranks, of which one is the fullest."""

        size = 4

        def call(self, method: str) -> list:
            assert method == "memory"
            return [{"perf/max_memory_allocated_gb": Max(gb)} for gb in (3.0, 70.0, 2.0, 1.0)]

    class Logged(list):
        def log(self, step, values):
            self.append((step, values))

    group = Group(PROMPT, (trajectory(0), trajectory(1)), (score(0), score(1)))
    separate = ("trainer.mode=separate_async", "rollout.engines=2", "rollout.tensor_parallel_size=2")
    for settings, devices in (((), 4), (separate, 8)):
        run = run_of(
            *settings,
            arch=ARCH,
            step=7,
            total_steps=9,
            timer=SimpleNamespace(pop=lambda: {"step": 2.0, "old_log_prob": 0.5}),
            reward=SimpleNamespace(take_counts=dict, take_seconds=list),
            expert_load=None,
            loader=SimpleNamespace(epoch=0),
            trackers=Logged(),
        )
        run.ranks = SimpleNamespace(group=Ranked(), device="NVIDIA H100 80GB HBM3")  # the driver has none
        run.dump.write = lambda step, groups: None
        report.step(run, [group], {})
        ((step, values),) = run.trackers
        assert step == 7 and not undocumented(values)
        assert 0 < values["perf/mfu/old_log_prob"] < 1
        assert values["perf/max_memory_allocated_gb"] == 70 and values["perf/throughput"] == 10 / (2 * devices)
