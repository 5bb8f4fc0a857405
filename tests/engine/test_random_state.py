"""Random numbers go on after a restart as they would have without one, where the layout is the same."""

import random
import warnings

import numpy as np
import pytest
import torch

from megatron_dapo.engine.random_state import load_random_state, save_random_state
from megatron_dapo.parallel.topology import Topology


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_same_layout_goes_on(tmp_path):
    save_random_state(tmp_path, Topology(world=2, tensor=2), 1)
    expected = draw()
    draw()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_random_state(tmp_path, Topology(world=2, tensor=2), 1)
    assert draw() == expected


def test_another_layout_starts_anew_and_says_so(tmp_path):
    save_random_state(tmp_path, Topology(world=2, tensor=2), 0)
    with pytest.warns(UserWarning, match="another layout"):
        assert not load_random_state(tmp_path, Topology(world=4, tensor=4), 0)
