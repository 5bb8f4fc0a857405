"""Oracle numbers that do not fit a table: what verl 0.9.1 answers to one irregular batch, from `verl_numbers.json`.

They were made by running verl on these inputs (float32, CPU); the file's "inputs" say which. `clip_cov` is missing because
it draws at random there, `grpo_passk` because verl refuses groups of one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBERS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def given_input(name: str) -> Tensor:
    values = torch.tensor(NUMBERS["inputs"][name])
    return values.bool() if name == "mask" else values


GROUP_IDS: list[str] = NUMBERS["inputs"]["group_ids"]
COMPONENTS: dict[str, Tensor] = {k: torch.tensor(v) for k, v in NUMBERS["inputs"]["component_rewards"].items()}
