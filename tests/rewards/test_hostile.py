"""Every verifier that runs in the trainer's own process takes linear time, whatever a model writes.

There is no deadline in that process, so a pattern that takes quadratic time (`^\\s*` over many empty lines) stops training.
"""

import time

import pytest

from megatron_dapo.rewards.routing import quick

MEGABYTE = 2**20
SLACK_S = 0.02  # the clock's, and what a first call computes once
SECONDS_PER_CHARACTER = 2e-6  # of CPU time; the slowest linear case (braces) takes a quarter of that

VERIFIERS = [
    ("math_dapo", False),
    ("math_dapo", True),
    ("gsm8k", False),
    ("gsm8k", True),
    ("choice", False),
    ("exact", False),
    ("json", False),
    ("regex", False),  # only handed on: the pool has a deadline
]

REPEATED = [
    *(
        "\n",
        "\r\n",
        " ",
        "\t",
        "\x0b",
        "\u2028",
        "-",
        "$",
        "1",
        "1,",
        "1/",
        "-1",
        "0",
        "a ",
        "**",
        "_",
        "~",
        "=",
        "\u0130",
    ),
    *("{", "}", "[", "[]", "(", '"', '\\"', "\\", "\\{", "\\boxed", "\\boxed{", "\\fbox{", "\\text{", "\\frac{1}"),
    *(
        "answer",
        "answer is ",
        "Answer:",
        "Answer:\n",
        "A:",
        "A :",
        "\nA:",
        "\n A",
        "####",
        "#### ",
        "#### 1",
        "option ",
    ),
    *("```", "```\n", "```json\n"),
]
AROUND = {  # what stands before and after the repeated text
    "nothing": ("", ""),
    "an answer": ("Answer: ", "\n#### 5"),
    "a box": ("\\boxed{", "5"),
    "many boxes": ("\\boxed{" * 16, ""),
    "brackets": ("[", "]"),
    "a question": ("option ", "x"),
}


def seconds(name: str, strict: bool, text: str) -> float:
    began = time.process_time()
    quick(name, text, "5", {}, strict=strict)
    return time.process_time() - began


def sized(unit: str, around: tuple[str, str], length: int) -> str:
    return f"{around[0]}{unit * (length // len(unit))}{around[1]}"


@pytest.mark.parametrize(("name", "strict"), VERIFIERS)
def test_time_grows_with_the_length_at_most(name, strict):
    """Quadratic time would make even 16 k characters a second long, so a fault shows before the megabyte."""
    for length in (2**14, 2**16):
        for around in AROUND.values():
            for unit in REPEATED:
                taken = seconds(name, strict, sized(unit, around, length))
                assert taken < SLACK_S + SECONDS_PER_CHARACTER * length, (unit, around, length)


@pytest.mark.parametrize(("name", "strict"), VERIFIERS)
def test_a_megabyte_takes_four_times_the_time_of_a_quarter(name, strict):
    for unit in REPEATED:
        quarter, whole = (seconds(name, strict, sized(unit, ("", ""), size)) for size in (MEGABYTE // 4, MEGABYTE))
        assert whole < 2 * SLACK_S + 6 * quarter, unit
        assert whole < SLACK_S + SECONDS_PER_CHARACTER * MEGABYTE, unit
