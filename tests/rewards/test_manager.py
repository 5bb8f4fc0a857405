"""The manager with real worker processes: what it scores, what it survives, and what it counts."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dapo.config.sampling import RewardConfig
from megatron_dapo.data.types import Prompt, Trajectory
from megatron_dapo.rewards import RewardError, RewardManager, UnknownDataSource


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: i for i, char in enumerate(["<eos>", *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def ask(tokenizer, responses, truth="5", source="math_dapo", extra=None):
    prompts, trajectories = [], []
    for i, text in enumerate(responses):
        ids = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
        prompts.append(
            Prompt(f"0-{i}-0", 0, i, 0, (1,), ({"role": "user", "content": "?"},), source, truth, extra or {})
        )
        trajectories.append(Trajectory(f"0-{i}-0", 0, ids, (0.0,) * len(ids), "stop", (0,) * len(ids)))
    return prompts, trajectories


def config(**keys) -> RewardConfig:
    return RewardConfig.model_validate(keys)


def custom(tmp_path: Path, body: str, **keys) -> RewardConfig:
    path = tmp_path / "reward.py"
    path.write_text(body)
    return config(custom_function={"path": str(path)} | keys.pop("custom_function", {}), **keys)


def test_built_in_scores(tokenizer):
    with RewardManager(config(), tokenizer, 64) as manager:
        scores = manager.score(*ask(tokenizer, ["Answer: 5.", "Answer: 6", "Answer: $\\sqrt{25}$", "hm"]))
        assert [(s.reward, s.raw, s.acc, s.status) for s in scores] == [
            (1.0, 1.0, 1.0, "ok"),
            (-1.0, -1.0, 0.0, "ok"),
            (1.0, 1.0, 1.0, "ok"),
            (-1.0, -1.0, 0.0, "ok"),
        ]
        assert scores[0].extra == {"score": 1.0, "pred": "5"}
        assert scores[2].extra["symbolic"] == "equal"
        assert manager.counts == {"scored": 4, "in_process": 3, "pooled": 1}
        (seconds,) = manager.take_seconds()  # of the job that a worker did
        assert 0 < seconds < 60 and manager.take_seconds() == []


def test_strict_follows_the_published_rules(tokenizer):
    with RewardManager(config(strict=True), tokenizer, 64) as manager:
        assert [s.acc for s in manager.score(*ask(tokenizer, ["Answer: 5.", "Answer: 5"]))] == [0.0, 1.0]


def test_no_workers_start_for_plain_verdicts(tokenizer):
    with RewardManager(config(), tokenizer, 64) as manager:
        manager.score(*ask(tokenizer, ["Answer: 5"] * 100))
        assert manager.worker_pids() == []


def test_an_empty_batch_is_no_scores(tokenizer):
    with RewardManager(config(), tokenizer, 64) as manager:
        assert manager.score([], []) == []


def test_an_unknown_source_ends_the_run(tokenizer):
    with RewardManager(config(), tokenizer, 64) as manager, pytest.raises(UnknownDataSource, match="codeforces"):
        manager.score(*ask(tokenizer, ["x"], source="codeforces"))


@pytest.mark.parametrize(
    ("length", "penalty"), [(10, 0.0), (12, 0.0), (14, -0.5), (16, -1.0), (20, -1.0)], ids=lambda v: str(v)
)
def test_overlong_shaping_follows_the_raw_score(tokenizer, length, penalty):
    """Limit 16, buffer 4, counted in tokens including the end token; the raw score stays what it was."""
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
    text = "Answer: 5" + " " * (length - len("Answer: 5") - 1)
    with RewardManager(config(overlong_buffer=buffer), tokenizer, 16) as manager:
        (score,) = manager.score(*ask(tokenizer, [text]))
    assert (score.raw, score.reward, score.extra["score"]) == (1.0, 1.0 + penalty, 1.0)
    assert (score.extra["overlong_reward"], score.extra["overlong"]) == (penalty, penalty < 0)


def test_unbounded_shaping_goes_below_the_factor(tokenizer):
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "unbounded": True}
    with RewardManager(config(overlong_buffer=buffer), tokenizer, 16) as manager:
        (score,) = manager.score(*ask(tokenizer, ["Answer: 5" + " " * 10]))
    assert score.reward == 1.0 - 2.0  # 20 tokens are 8 too many for a buffer of 4
    assert "overlong" not in score.extra


def test_a_buffer_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(RewardError, match=r"overlong_buffer\.len=32"):
        RewardManager(config(overlong_buffer={"enable": True, "len": 32}), tokenizer, 16)


def test_a_custom_function_gets_the_documented_arguments(tokenizer, tmp_path):
    body = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):\n"
        "    return {'score': len(solution_str) + bonus, 'acc': solution_str == ground_truth,\n"
        "            'who': data_source, 'k': extra_info['k']}\n"
    )
    settings = custom(tmp_path, body, custom_function={"kwargs": {"bonus": 0.5}})
    with RewardManager(settings, tokenizer, 64) as manager:
        (score,) = manager.score(*ask(tokenizer, ["abc"], truth="abc", source="mine", extra={"k": 7}))
    assert (score.raw, score.acc) == (3.5, 1.0)
    assert (score.extra["who"], score.extra["k"]) == ("mine", 7)


def test_a_float_is_its_own_accuracy(tokenizer, tmp_path):
    with RewardManager(custom(tmp_path, "def compute_score(**_): return 0.25\n"), tokenizer, 64) as manager:
        (score,) = manager.score(*ask(tokenizer, ["abc"]))
    assert (score.reward, score.acc) == (0.25, 0.25)


def test_an_async_function_waits_for_many_at_once(tokenizer, tmp_path):
    body = (
        "import asyncio\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0.3)\n"
        "    return float(solution_str)\n"
    )
    with RewardManager(custom(tmp_path, body), tokenizer, 64) as manager:
        began = time.monotonic()
        scores = manager.score(*ask(tokenizer, [str(i) for i in range(64)]))
        assert [s.raw for s in scores] == [float(i) for i in range(64)]
        assert time.monotonic() - began < 64 * 0.3 / 2  # one after the other would take 19 s


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def score(): pass\n", "functions there: score"),
        ("import no_such_module\n", r"cannot import .*no_such_module"),
        ("def compute_score(:\n", r"cannot import .*SyntaxError"),
    ],
)
def test_a_function_that_cannot_load_is_refused_at_once(tokenizer, tmp_path, body, message):
    with pytest.raises(RewardError, match=message):
        RewardManager(custom(tmp_path, body), tokenizer, 64)


def test_a_missing_file_is_refused_at_once(tokenizer):
    with pytest.raises(RewardError, match=r"'/nowhere/reward\.py' is not a file"):
        RewardManager(config(custom_function={"path": "/nowhere/reward.py"}), tokenizer, 64)


UNRELIABLE = """
import os, signal, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "raise":
        raise ValueError("bad verifier")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "good"
    if solution_str == "socket":
        import threading
        return {"score": 1.0, "lock": threading.Lock()}
    return 1.0
"""


@pytest.mark.parametrize(
    ("trouble", "counts"),
    [
        ("hang", {"timeouts": 2, "workers_replaced": 2, "retries": 1}),
        ("die", {"crashes": 2, "workers_replaced": 2, "retries": 1}),
        ("raise", {"errors": 2, "retries": 1}),
        ("nan", {}),
        ("text", {}),
        ("socket", {"errors": 2, "retries": 1}),
    ],
)
def test_trouble_with_one_sample_is_counted_and_dropped(tokenizer, tmp_path, trouble, counts):
    settings = custom(tmp_path, UNRELIABLE, timeout_s=0.5, num_workers=2, retries=1)
    with RewardManager(settings, tokenizer, 64) as manager:
        responses = ["fine"] * 5 + [trouble] + ["fine"] * 20
        scores = manager.score(*ask(tokenizer, responses))
        assert [s.status for s in scores] == ["failed" if r == trouble else "ok" for r in responses]
        assert [s.raw for s in scores if s.status == "ok"] == [1.0] * 25
        expected = {"scored": 26, "pooled": 26, "failed": 1, "dropped": 1} | counts
        assert {key: value for key, value in manager.counts.items() if value} == expected


def test_policy_zero_scores_zero_and_says_so(tokenizer, tmp_path):
    with RewardManager(custom(tmp_path, UNRELIABLE, on_failure="zero", retries=0), tokenizer, 64) as manager:
        (score,) = manager.score(*ask(tokenizer, ["raise"]))
        assert (score.reward, score.acc, score.status) == (0.0, 0.0, "ok")
        assert "bad verifier" in score.extra["failure"]
        assert manager.counts["zeroed"] == 1


def test_policy_raise_ends_the_run(tokenizer, tmp_path):
    with (
        RewardManager(custom(tmp_path, UNRELIABLE, on_failure="raise"), tokenizer, 64) as manager,
        pytest.raises(RewardError, match="bad verifier"),
    ):
        manager.score(*ask(tokenizer, ["raise"]))


def test_a_worker_killed_from_outside_costs_nothing_but_a_retry(tokenizer, tmp_path):
    body = "import time\ndef compute_score(**_):\n    time.sleep(0.05)\n    return 1.0\n"
    with RewardManager(custom(tmp_path, body, retries=2), tokenizer, 64) as manager:
        victim = threading.Timer(0.4, lambda: os.kill(manager.worker_pids()[0], signal.SIGKILL))
        victim.start()
        scores = manager.score(*ask(tokenizer, ["x"] * 60))
        victim.join()
        assert [s.raw for s in scores] == [1.0] * 60
        assert (manager.counts["crashes"], manager.counts["retries"]) == (1, 1)


def test_a_stopped_worker_is_replaced(tokenizer, tmp_path):
    body = "def compute_score(**_):\n    return 1.0\n"
    with RewardManager(custom(tmp_path, body, timeout_s=1, num_workers=1), tokenizer, 64) as manager:
        os.kill(manager.worker_pids()[0], signal.SIGSTOP)
        scores = manager.score(*ask(tokenizer, ["x" * 50] * 20))
        assert [s.raw for s in scores] == [1.0] * 20
        assert manager.counts["timeouts"] == 1


def test_an_async_function_that_blocks_its_loop_is_killed(tokenizer, tmp_path):
    body = (
        "import time\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'hang':\n"
        "        time.sleep(1000)\n"
        "    return 1.0\n"
    )
    with RewardManager(custom(tmp_path, body, timeout_s=0.5, retries=1), tokenizer, 64) as manager:
        scores = manager.score(*ask(tokenizer, ["fine"] * 10 + ["hang"]))
        assert [s.status for s in scores] == ["ok"] * 10 + ["failed"]


def test_an_async_function_that_waits_too_long_is_cancelled_without_a_kill(tokenizer, tmp_path):
    body = "import asyncio\nasync def compute_score(**_):\n    await asyncio.sleep(1000)\n"
    with RewardManager(custom(tmp_path, body, timeout_s=0.3, retries=0), tokenizer, 64) as manager:
        pids = manager.worker_pids()
        scores = manager.score(*ask(tokenizer, ["a"] * 4))
        assert [s.status for s in scores] == ["failed"] * 4
        assert manager.worker_pids()[0] == pids[0]


def test_many_threads_share_one_manager(tokenizer):
    with RewardManager(config(num_workers=2), tokenizer, 64) as manager:
        results = {}

        def work(i: int) -> None:
            responses = [f"Answer: {i}", f"Answer: $\\sqrt{{{i * i}}}$", "Answer: $\\sqrt{7}$"]
            results[i] = [s.acc for s in manager.score(*ask(tokenizer, responses, truth=str(i)))]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: [1.0, 1.0, 0.0] for i in range(2, 10)}
        assert manager.counts["scored"] == 24


def test_close_ends_the_workers_and_a_waiting_call(tokenizer, tmp_path):
    body = "import time\ndef compute_score(**_):\n    time.sleep(1000)\n"
    manager = RewardManager(custom(tmp_path, body, timeout_s=600), tokenizer, 64)
    pids = manager.worker_pids()
    results = []
    call = threading.Thread(target=lambda: results.extend(manager.score(*ask(tokenizer, ["x"] * 40))))
    call.start()
    time.sleep(0.3)
    manager.close()
    call.join(timeout=10)
    assert [s.status for s in results] == ["failed"] * 40
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RewardError, match="closed"):
        manager.score(*ask(tokenizer, ["x"]))


def test_workers_die_with_their_parent(tmp_path):
    """A trainer that is killed leaves no verifier behind, not even one that hangs."""
    import subprocess
    import sys

    (tmp_path / "reward.py").write_text("import time\ndef compute_score(**_):\n    time.sleep(1000)\n")
    script = (
        "from megatron_dapo.rewards.pool import Pool\nfrom megatron_dapo.rewards.worker import Setup\n"
        "from megatron_dapo.rewards.custom import CustomFunction\nimport threading, time, os\n"
        f"pool = Pool(1, Setup(1.0, CustomFunction({str(tmp_path / 'reward.py')!r})))\n"
        "pool.start()\nprint(pool.pids()[0], flush=True)\n"
        "threading.Timer(0.5, lambda: os._exit(0)).start()\npool.run([('custom', ('a', 'b', 'c', {}))])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.2)
    else:
        assert not Path(f"/proc/{pid}/stat").exists()
