"""Boxed values and balanced braces."""

import pytest

from megatron_dapo.rewards.latex import last_boxed


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{1 \\boxed{2} 3", "2"),
        ("\\boxed{1 \\boxed{2 3}", "2 3"),
        ("\\fbox{1} \\boxed{2 \\boxed{3 \\{\\}", "1"),
        ("\\boxed{1 {} \\boxed{2", None),
        ("\\boxed{\\boxed {5}}", "5"),
    ],
)
def test_the_last_box_that_closes_is_read(text, boxed):
    found = last_boxed(text)
    assert (found and found[1]) == boxed
