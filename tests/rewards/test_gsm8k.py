"""The grade-school verifier, on its formats and on every label of the published model solutions."""

import json

import pytest

from megatron_dapo.rewards import gsm8k

CASES = [
    ("So 9 * 2 = 18.\n#### 18", "18", True),
    ("#### 1,234", "1234", True),
    ("#### $18", "18", True),
    ("#### 18.0", "18", True),
    ("#### -3", "-3", True),
    ("#### 18 eggs", "18", True),
    ("#### 17\n#### 18", "18", True),
    ("#### 18\n#### 17", "18", False),
    ("A: 18", "18", True),
    ("Let me see.\n\n \tA : 18\nor 17", "18", True),
    ("Answer: 18", "18", True),
    ("Answer: 18 eggs", "18", True),
    ("\\boxed{18}", "18", True),
    ("She earns $18 a day.", "18", True),
    ("She earns $18 a day for 7 days.", "18", False),
    ("There are 1,000 of them.", "1000", True),
    ("####", "18", False),
    ("", "18", False),
    ("none", "18", False),
    ("#### 1/2", "0.5", True),
    ("#### 17 #### 18", "18", True),
    ("#### 18 ####", "18", True),
    ("#### 17\n A: 18", "18", True),
    ("A: 17\n#### 18\nso 19", "18", True),
    ("xA: 17 or 18", "18", True),
    ("18 of them. " + "x" * 5000, "18", True),
    ("1," + "000," * 100 + "000", "1" + "000" * 101, True),
    ("9" * 300 + ".5", "0.5", False),
]


@pytest.mark.parametrize(("response", "truth", "right"), CASES)
def test_formats(response, truth, right):
    verdict = gsm8k.verify(response, truth)
    assert (verdict.score, verdict.acc) == (float(right), right), verdict.pred


@pytest.mark.parametrize(
    ("response", "right"),
    [("#### 18", True), ("#### 1,8", True), ("####18", False), ("Answer: 18", False), ("18", False)],
)
def test_strict_wants_the_marker(response, right):
    assert gsm8k.verify(response, "18", strict=True).acc is right


def test_every_published_label_is_reproduced(shared_data):
    """200 problems, four models each: 800 labels. There is no disagreement to explain."""
    lines = (shared_data / "gsm8k_example_model_solutions_200.jsonl").read_text().splitlines()
    disagreements, seen = [], 0
    for number, line in enumerate(lines):
        row = json.loads(line)
        truth = row["ground_truth"].rpartition("A:")[2].strip()
        for model, solution in row.items():
            if model in ("question", "ground_truth"):
                continue
            seen += 1
            verdict = gsm8k.verify(solution["solution"], truth)
            if verdict.acc != solution["is_correct"]:
                disagreements.append((number, model, verdict.pred, truth))
    assert (seen, disagreements) == (800, [])


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_published_solution_is_right(shared_data, split):
    for line in (shared_data / f"gsm8k_{split}.jsonl").read_text().splitlines():
        solution = json.loads(line)["answer"]
        truth = solution.rpartition("####")[2].strip()
        assert gsm8k.verify(solution, truth).acc
        assert gsm8k.verify(solution, truth.replace(",", ""), strict=True).acc
