"""What the default math verifier accepts and refuses: a table of cases, each a response, the truth and the verdict."""

import time

import pytest

from megatron_dapo.rewards import compute_score
from megatron_dapo.rewards.math_robust import clean, verify
from megatron_dapo.rewards.verdict import INVALID, Verdict

RIGHT = [
    # where the answer is
    ("Answer: 540", "540"),
    ("answer: 540", "540"),
    ("ANSWER : 540", "540"),
    ("Answer:540", "540"),
    ("Answer:\n540", "540"),
    ("Answer:\n\n  540\n", "540"),
    ("Answer: 1\nWait.\nAnswer: 540", "540"),
    ("Answer: 12\nso \\boxed{540}", "540"),
    ("\\boxed{12}\nAnswer: 540", "540"),
    ("\\boxed{540}", "540"),
    ("\\fbox{540}", "540"),
    ("\\boxed {540}", "540"),
    ("thus $\\boxed{540}$.", "540"),
    ("\\boxed{\\boxed{540}}", "540"),
    ("\\boxed{1} and finally \\boxed{540}", "540"),
    ("\\boxed{540} and an unclosed \\boxed{3", "540"),
    ("Answer: \\boxed{540}", "540"),
    ("Answer: the value is \\boxed{540}, as claimed", "540"),
    ("Final Answer: 540", "540"),
    ("The answer is: 540", "540"),
    ("Answer: 540\n\nHope this helps!", "540"),
    ("Answer: 540\n" + "x" * 5000, "540"),
    ("Answer: 540\nI put it after \"Answer:\".", "540"),
    ("Answer: 540\nAnswer:", "540"),
    ("Answer:\n\\[\n540\n\\]", "540"),
    ("Answer:\n$$\n540\n$$", "540"),
    ("Answer:\n```\n540\n```", "540"),
    # decoration
    ("**Answer:** 540", "540"),
    ("**Answer**: 540", "540"),
    ("Answer: **540**", "540"),
    ("__Answer:__ 540", "540"),
    ("### Answer: 540", "540"),
    ("Answer: `540`", "540"),
    ("> Answer: 540", "540"),
    ("Answer: 540.", "540"),
    ("Answer: 540 .", "540"),
    ("Answer: $540$", "540"),
    ("Answer: $540.$", "540"),
    ("Answer: $540$.", "540"),
    ("Answer: $$540$$", "540"),
    ("Answer: \\(540\\)", "540"),
    ("Answer: \\[540\\]", "540"),
    ("Answer: $\\boxed{540}$", "540"),
    ("Answer: \\text{540}", "540"),
    ("Answer: \\textbf{540}", "540"),
    ("Answer: \\mathbf{540}", "540"),
    ("Answer: \"540\"", "540"),
    ("Answer: 540\r\n", "540"),
    ("Answer: x = 540", "540"),
    ("Answer: $n=540$", "540"),
    ("Answer: $f(x) = 540$", "540"),
    ("Answer: $x_1 = 540$", "540"),
    ("Answer: The total is $540$ units.", "540"),
    ("Answer: the answer is 540", "540"),
    ("Answer: a 5", "5"),
    ("Answer: $x = y = 540$", "540"),
    ("Answer: 500 + 40 = 540", "540"),
    ("Answer: 540\\;", "540"),
    ("Answer: the name is $\\text{Evelyn}$", "Evelyn"),
    # numbers
    ("Answer: 0540", "540"),
    ("Answer: 007", "7"),
    ("Answer: +5", "5"),
    ("Answer: -7", "-7"),
    ("Answer: -07", "-7"),
    ("Answer: 1,000", "1000"),
    ("Answer: 1,234,567", "1234567"),
    ("Answer: 1{,}000", "1000"),
    ("Answer: $1\\,000$", "1000"),
    ("Answer: 1,\\!000", "1000"),
    ("Answer: 1 000 000", "1000000"),
    ("Answer: 1000", "1,000"),
    ("Answer: -1,000.50", "-1000.5"),
    ("Answer: 540.0", "540"),
    ("Answer: 540.00", "540"),
    ("Answer: .5", "0.5"),
    ("Answer: 0.5", "\\frac{1}{2}"),
    ("Answer: 1/2", "\\frac12"),
    ("Answer: 2/4", "1/2"),
    ("Answer: \\frac{2}{4}", "0.5"),
    ("Answer: \\dfrac{1}{2}", "\\frac{1}{2}"),
    ("Answer: \\tfrac12", "1/2"),
    ("Answer: \\frac 1 2", "1/2"),
    ("Answer: -\\frac{1}{2}", "-1/2"),
    ("Answer: \\frac{-1}{2}", "-0.5"),
    ("Answer: 1\\frac{1}{2}", "3/2"),
    ("Answer: 1.5e3", "1500"),
    ("Answer: 1.5 \\times 10^3", "1500"),
    ("Answer: $1.5\\cdot10^{-3}$", "0.0015"),
    ("Answer: 123456789012345678901234567890", "123456789012345678901234567890"),
    # units
    ("Answer: 7 units", "7"),
    ("Answer: 12 cm", "12"),
    ("Answer: 12cm", "12"),
    ("Answer: 12 \\text{ cm}", "12"),
    ("Answer: $12\\,\\mathrm{cm}$", "12"),
    ("Answer: 12 \\text{ cm}^2", "12"),
    ("Answer: 12 square units", "12"),
    ("Answer: 60 miles per hour", "60"),
    ("Answer: 60 km/h", "60"),
    ("Answer: $18", "18"),
    ("Answer: \\$18", "18"),
    ("Answer: \u20ac18", "18"),
    ("Answer: 18 dollars", "18"),
    ("Answer: 45^\\circ", "45"),
    ("Answer: $45^{\\circ}$", "45"),
    ("Answer: 45\u00b0", "45"),
    ("Answer: 45 degrees", "45"),
    ("Answer: 50%", "50"),
    ("Answer: 50\\%", "50"),
    ("Answer: 50", "50\\%"),
    ("Answer: \\frac{1}{2} hours", "1/2"),
    ("Answer: 2\\pi \\text{ cm}", "2\\pi"),
    ("Answer: (1,2) units", "(1,2)"),
    ("Answer: 21st", "21"),
    ("Answer: $5^{\\text{th}}$", "5^{\\text{th}}"),
    # unicode
    ("Answer\uff1a540", "540"),
    ("Answer: \uff15\uff14\uff10", "540"),
    ("Answer: \u22127", "-7"),
    ("Answer: \u20137", "-7"),
    ("Answer: \u00bd", "1/2"),
    ("Answer: 1\u20442", "1/2"),
    ("Answer: 5\u200b40", "540"),
    ("Answer:\u00a0540", "540"),
    ("Answer: 1\u202f000", "1000"),
    ("\u0130\u0130 Answer: 540", "540"),  # capital letters that become longer in lower case
    ("\U0001f600 Answer: 540 ", "540"),
    ("Answer: 2\u03c0", "2\\pi"),
    ("Answer: 3\u00b2", "3^{2}"),
    ("Answer: 540\u3002", "540"),
    # text
    ("Answer: Evelyn", "\\text{Evelyn}"),
    ("Answer: \\text{(B)}", "(B)"),
    ("Answer: (1,2)", "(1, 2)"),
    ("Answer: $\\left(1,2\\right)$", "(1,2)"),
    ("Answer: x^2 + 1", "x^2+1"),
    ("Answer: (-\\infty, 2]", "(-\\infty,2]"),
    ("Answer: \\{1, 2\\}", "\\{1,2\\}"),
    ("Answer: \\pi r", "\\pi  r"),
]  # fmt: skip

WRONG = [
    ("", "540"),
    ("540", "540"),
    ("The answer is 540", "540"),  # no marker, no box
    ("Answer:", "540"),
    ("Answer: ", "540"),
    ("Answer: \\boxed{}", "540"),
    ("\\boxed{540", "540"),
    ("Answer: 541", "540"),
    ("Answer: 54", "540"),
    ("Answer: 540\nAnswer: 541", "540"),
    ("Answer: 540\n\\boxed{541}", "540"),
    ("\\boxed{540} Answer: 541", "540"),
    ("Answer: 540 or 541", "540"),
    ("Answer: 540, 541", "540"),
    ("Answer: not 540", "540"),
    ("Answer: 5 million", "5"),
    ("Answer: $5$ million", "5"),
    ("Answer: 5 and a half", "5"),
    ("Answer: between $5$ and 6", "5"),
    ("Answer: half of $10$", "10"),
    ("Answer: 5x", "5"),
    ("Answer: x = 5, y = 7", "7"),
    ("Answer: x = 5 or x = 7", "7"),
    ("Answer: x >= 7", "7"),
    ("Answer: 4", "x^2+y^2=4"),
    ("Answer: 1,000", "1,0"),
    ("Answer: -b", "a-b"),
    ("Answer: 5m", "5"),
    ("Answer: 5!", "5"),
    ("Answer: -5", "5"),
    ("Answer: 0.333", "1/3"),
    ("Answer: 0.3333333333333", "\\frac{1}{3}"),
    ("Answer: 1.000000001", "1"),
    ("Answer: 1e999", "1"),
    ("Answer: 1/0", "0"),
    ("Answer: \\frac{1}{0}", "0"),
    ("Answer: (2,1)", "(1,2)"),
    ("Answer: 1,2", "12"),
    ("Answer: 50%", "0.5"),
    ("Answer: Evelyn", "Odette"),
    ("Answer: None", "540"),
    ("Answer: [INVALID]", "540"),
    ("Answer: \\text{}", "540"),
    ("Answer: {}{}{}{", "540"),
    ("Answer: }}}}", "540"),
    ("Answer: \\\\\\", "540"),
    ("Answer: $$$$$$", "540"),
    ("Answer: 540540540540", "540"),
    ("Answer: " + "5" * 1900, "5"),
    ("Answer: " + "5" * 5000, "5" * 5000),  # longer than any final answer
    ("Answer: 540\x00", "541"),
    ("Answer: 12:00", "1:00"),
    ("Answer: \\pm 5", "5"),
    ("Answer: 1, 2, \\ldots, n", "1, 3, \\ldots, n"),
]  # fmt: skip

SYMBOLIC_RIGHT = [
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("2\\sqrt2", "\\sqrt8"),
    ("sqrt(8)", "2\\sqrt{2}"),
    ("\u221a8", "2\\sqrt{2}"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    ("\\binom{5}{2}", "10"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
    ("\\pi/2", "\\frac{\\pi}{2}"),
    ("3.14159265358979", "\\pi"),
    ("2,1", "1,2"),
    ("y+x", "x+y"),
    ("x+y=1", "2x+2y=2"),
    ("5<x", "x>5"),
    ("[2,\\infty)", "x \\ge 2"),
    ("\\log_2 8", "3"),
    ("\\sum_{k=1}^{10} k", "55"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\\\frac{4}{2}\\end{pmatrix}"),
]

SYMBOLIC_WRONG = [
    # math-verify alone says that these are equal
    ("\\frac{1}{2006!}", "\\frac{1}{2004!}"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("\\frac{1}{3\\cdot2^{2006}}", "\\frac{2^{2005}+1}{3\\cdot2^{2006}}"),
    ("(1,2)", "\\{1,2\\}"),
    ("3.14159265", "\\pi"),
    ("1.4142", "\\sqrt{2}"),
    # it and we say that these are not
    ("2\\sqrt{3}", "\\sqrt{8}"),
    ("\\pm2021", "2021"),
    ("1+i", "1-i"),
    ("x<5", "x>5"),
    ("x>5", "5"),
    ("10^{1000}+1", "10^{1000}"),
    ("3x-1y+13=0", "3x+4y+14=0"),
    ("\\frac{1}{0}", "\\infty"),
    ("x+1", "x+2"),
    ("D=(0,1)", "D=(0,1.5)"),
    # too large to look at
    ("9^{9^{9}}", "3^{2}+x"),
    ("99999^{99999}", "x"),
    ("1234567!", "\\sqrt{7}"),
    ("9^{9999}^{9999}", "\\sqrt{7}"),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_right_without_algebra(response, truth):
    verdict = verify(response, truth)
    assert isinstance(verdict, Verdict)
    assert (verdict.score, verdict.acc) == (1.0, True), verdict.pred


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_wrong(response, truth):
    assert compute_score("math_dapo", response, truth)["acc"] is False


@pytest.mark.parametrize(("answer", "truth"), SYMBOLIC_RIGHT)
def test_right_by_algebra(answer, truth):
    result = compute_score("math_dapo", f"So\nAnswer: ${answer}$", truth)
    assert (result["score"], result["acc"]) == (1.0, True), result


@pytest.mark.parametrize(("answer", "truth"), SYMBOLIC_WRONG)
def test_wrong_by_algebra_within_its_deadline(answer, truth):
    began = time.monotonic()
    result = compute_score("math_dapo", f"So\nAnswer: ${answer}$", truth)
    assert (result["score"], result["acc"]) == (-1.0, False), result
    assert time.monotonic() - began < 60  # the first call starts a worker


def test_a_response_without_an_answer_is_invalid():
    assert verify("I do not know.", "540") == Verdict(-1.0, False, INVALID)


HOSTILE = {
    "plain text": "x" * 1_000_000,
    "answers without colon": "answer " * 140_000,
    "empty answers": "Answer:\n" * 120_000,
    "unclosed boxes": "\\boxed{" * 140_000,
    "open braces": "\\boxed{" + "{" * 1_000_000,
    "nested boxes": "\\boxed{" * 30_000 + "5" + "}" * 30_000,
    "spaces": "Answer" + " " * 1_000_000 + ": 5",
    "newlines": "Answer:" + "\n" * 1_000_000 + "5",
    "digits": "Answer: " + "9" * 1_000_000,
    "dollars": "Answer: " + "$" * 1_000_000,
    "backslashes": "\\" * 1_000_000,
    "fractions": "Answer: " + "\\frac" * 200_000,
    "texts": "Answer: " + "\\text{" * 300 + "5" + "}" * 300,
    "commas": "Answer: " + "1," * 900,
    "words": "Answer: 5 " + "cm " * 600,
    "long lower case": "\u0130" * 500_000 + "Answer: 5",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_megabyte_takes_linear_time(text):
    began = time.process_time()
    verify(text, "5")
    assert time.process_time() - began < 1.0


def test_clean_is_idempotent():
    for _, truth in RIGHT + WRONG + SYMBOLIC_RIGHT + SYMBOLIC_WRONG:
        assert clean(clean(truth)) == clean(truth)
