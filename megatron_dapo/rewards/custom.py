"""A user's own reward function, loaded from a Python file."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dapo.rewards.errors import RewardError


@dataclass(frozen=True)
class CustomFunction:
    """Where the function is, and keyword arguments that every call gets."""

    path: str
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """The function `(data_source, solution_str, ground_truth, extra_info, **kwargs)`, plain or async.

        Raises RewardError when the file is missing or fails to import, or has no such function.
        """
        module = _load_module(Path(self.path))
        functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
        if self.name not in functions:
            there = ", ".join(sorted(functions)) or "none"
            raise RewardError(
                f"reward.custom_function.name={self.name!r} is not a function of {self.path}; functions there: {there}"
            )
        return functions[self.name]


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward.custom_function.path={str(path)!r} is not a file")
    spec = importlib.util.spec_from_file_location("megatron_dapo_custom_reward", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.custom_function.path={str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's module raises, the message must name it
        raise RewardError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    return module
