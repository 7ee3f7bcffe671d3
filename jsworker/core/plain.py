"""Pydantic models as plain JSON values."""

import math
from typing import Any

from pydantic import BaseModel

from jsworker.core.errors import InvalidJson


def plain(value: Any, *, what: str) -> Any:
    """Return a pydantic model as the JSON values it is made of, anything else as it is.

    Args:
        value: a model, or a value that ``strict_json`` judges.
        what: how to name it in an error, for example ``payload``.

    Raises:
        InvalidJson: the model has no JSON form, or holds NaN or an infinity.
    """
    if not isinstance(value, BaseModel):
        return value
    try:  # without warnings: they would show values
        found = value.model_dump(mode="json", warnings=False)
        finite = is_finite(value.model_dump(warnings=False))
    except (ValueError, RecursionError):
        raise InvalidJson(f"{what} of type {type(value).__name__} has no JSON form") from None
    if not finite:  # pydantic has written null
        raise InvalidJson(f"{what} holds a number that is not finite")
    return found


def is_finite(value: Any) -> bool:
    """Tell whether a value, as pydantic's Python form has it, holds neither NaN nor an infinity."""
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return all(map(is_finite, value.values()))
        case list() | tuple() | set() | frozenset():
            return all(map(is_finite, value))
        case _:
            return True
