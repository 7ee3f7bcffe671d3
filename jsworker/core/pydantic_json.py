"""The JSON form of results and models, as pydantic writes them."""

import inspect
import math
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Never, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter
from pydantic_core import to_jsonable_python

from jsworker.core import strict_json
from jsworker.core.errors import InvalidJson

_CONFIG: Final = ConfigDict(ser_json_inf_nan="constants")  # not silently null
_CYCLE: Final = f"result holds a circle, or nests deeper than {strict_json.MAX_DEPTH} levels"
ANYTHING: Final = TypeAdapter[Any](Any, config=_CONFIG)
"""Writes results of a ``process`` without a return type."""


def result_type(process: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return the adapter that writes the results of a ``process`` method.

    Raises:
        PydanticUserError: its return annotation names a type that has no JSON form.
    """
    try:
        annotation = typing.get_type_hints(inspect.unwrap(process), include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 -- names that only a type checker sees, say
        return ANYTHING
    if get_origin(annotation) in {Awaitable, Coroutine}:
        annotation = get_args(annotation)[-1]
    if annotation in (Any, None, type(None), NoReturn, Never, object):
        return ANYTHING
    try:
        return TypeAdapter(annotation, config=_CONFIG)
    except PydanticUserError:  # models, dataclasses and TypedDicts have a configuration of their own
        return TypeAdapter(annotation)


def write_result(value: Any, adapter: TypeAdapter[Any]) -> str:
    """Return a result as JSON text.

    Args:
        value: what ``process`` returned.
        adapter: from ``result_type``; a value of another type is written by its own type.

    Raises:
        InvalidJson: it holds what JSON, or PostgreSQL, has no form for.
    """
    if adapter is ANYTHING:
        try:
            return strict_json.dumps(value, what="result")
        except InvalidJson:
            pass  # pydantic may know a JSON form
    try:
        found, finite = _json_form(value, adapter)
    except (ValueError, RecursionError):
        raise InvalidJson(_why_unwritable(value, adapter)) from None
    text = strict_json.dumps(found, what="result")
    if not finite:
        raise InvalidJson("result holds a number that is not finite")
    return text


def model_values(value: Any, *, what: str) -> Any:
    """Return a pydantic model as the JSON values it is made of, anything else as it is.

    Args:
        value: a model, or a value that ``strict_json`` checks.
        what: its name in an error, for example ``payload``.

    Raises:
        InvalidJson: the model has no JSON form, or holds NaN or an infinity.
    """
    if not isinstance(value, BaseModel):
        return value
    try:
        found, finite = _json_form(value, ANYTHING)
    except (ValueError, RecursionError):
        raise InvalidJson(f"{what} of type {type(value).__name__} has no JSON form") from None
    if not finite:
        raise InvalidJson(f"{what} holds a number that is not finite")
    return found


def _json_form(value: Any, adapter: TypeAdapter[Any]) -> tuple[Any, bool]:
    """Return a value as pydantic writes it, and whether all its numbers are finite: others became null."""
    # Without warnings: they would show values.
    return adapter.dump_python(value, mode="json", warnings=False), _is_finite(
        adapter.dump_python(value, warnings=False)
    )


def _is_finite(value: Any) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return all(map(_is_finite, value.values()))
        case list() | tuple() | set() | frozenset():
            return all(map(_is_finite, value))
        case _:
            return True


def _why_unwritable(value: Any, adapter: TypeAdapter[Any]) -> str:
    try:
        parts = adapter.dump_python(value, warnings=False)
        place, part = strict_json.find(parts, lambda part: not _is_writable(part))
    except (ValueError, RecursionError):
        return _CYCLE
    if not place and part is not parts:
        return _CYCLE
    return f"result holds a value of type {type(part).__name__}, which is no JSON{place}"


def _is_writable(value: Any) -> bool:
    try:
        to_jsonable_python(value)
    except (ValueError, RecursionError):
        return False
    return True
