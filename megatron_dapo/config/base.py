"""What every configuration section shares: frozen, no unknown keys, and a few number types."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of keys; the string below each key is its documentation (see `document.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def _no_bool(value: object) -> object:
    """`True` is an int to Python; to a user who wrote `rollout.n=true` it is a mistake."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not true/false")
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
NonNegativeInt = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Every = Annotated[int, BeforeValidator(_no_bool), Field(ge=-1)]  # a period or a limit; -1 means never or no limit
Float = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]  # one string is accepted for a list of one
