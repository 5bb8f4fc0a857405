"""What a summary claims where some answers could not be judged."""

from megatron_dapo.data.types import Prompt, Score
from megatron_dapo.evaluation.answers import Answer
from megatron_dapo.evaluation.summary import Judged, summarize, table


def judged(problem: int, sample: int, acc: float | None) -> Judged:
    prompt = Prompt(f"p{problem}", 0, problem, 0, (1,), ({"role": "user", "content": "?"},), "aime", "5")
    score = Score(0, 0, 0, {"failure": "crash"}, "failed") if acc is None else Score(acc, acc, acc, {"pred": str(acc)})
    return Judged(prompt, Answer(problem, sample, "", 1, "stop"), score)


def test_one_failed_verdict_changes_no_name():
    rows = [judged(0, 0, 1.0), judged(0, 1, 1.0), judged(1, 0, 0.0), judged(1, 1, None)]
    whole = summarize([judged(problem, sample, 1.0) for problem in range(2) for sample in range(2)], seed=1)
    summary = summarize(rows, seed=1)
    found = summary["sources"]["aime"]
    assert found["estimates"].keys() == whole["sources"]["aime"]["estimates"].keys()
    assert summary["metrics"].keys() == whole["metrics"].keys()
    assert found["estimates"]["avg@2"]["value"] == summary["metrics"]["val-core/aime/acc/mean@2"] == 0.5
    assert (found["problems"], found["samples"], found["unscored"]) == (2, 4, 1)
    assert (summary["metrics"]["val-aux/aime/unscored"], whole["metrics"]["val-aux/aime/unscored"]) == (1, 0)
    assert "1 could not be judged" in table(summary)


def test_a_problem_without_a_verdict_is_counted_and_left_out():
    summary = summarize([judged(0, 0, 1.0), judged(1, 0, None)], seed=1)
    found = summary["sources"]["aime"]
    assert found["estimates"]["avg@1"]["value"] == 1.0 and (found["problems"], found["unscored"]) == (2, 1)
