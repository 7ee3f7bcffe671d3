"""Results as JSON text: as pydantic writes what ``process`` is annotated to return."""

import inspect
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Never, NoReturn, get_args, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter
from pydantic_core import to_jsonable_python

from jsworker.core import strict_json
from jsworker.core.errors import InvalidJson
from jsworker.core.plain import is_finite

_CONFIG: Final = ConfigDict(ser_json_inf_nan="constants")  # not silently null
_CIRCLE: Final = f"result holds a circle, or nests deeper than {strict_json.MAX_DEPTH} levels"
ANYTHING: Final = TypeAdapter[Any](Any, config=_CONFIG)
"""Writes what nothing is said about."""


def result_type(process: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return what writes the results of a ``process`` method.

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
        adapter: from ``result_type``; a value of another type is written as what it is.

    Raises:
        InvalidJson: it holds what JSON, or PostgreSQL, has no form for.
    """
    if adapter is ANYTHING:
        try:
            return strict_json.dumps(value, what="result")
        except InvalidJson:
            pass  # it may have a JSON form
    try:  # without warnings: they would show values
        found = adapter.dump_python(value, mode="json", warnings=False)
        finite = is_finite(adapter.dump_python(value, warnings=False))
    except (ValueError, RecursionError):
        raise InvalidJson(_why_unwritable(value, adapter)) from None
    text = strict_json.dumps(found, what="result")
    if not finite:  # pydantic has written null
        raise InvalidJson("result holds a number that is not finite")
    return text


def _why_unwritable(value: Any, adapter: TypeAdapter[Any]) -> str:
    try:
        parts = adapter.dump_python(value, warnings=False)
        place, part = strict_json.find(parts, lambda part: not _is_writable(part))
    except (ValueError, RecursionError):
        return _CIRCLE
    if not place and part is not parts:
        return _CIRCLE
    return f"result holds a value of type {type(part).__name__}, which is no JSON{place}"


def _is_writable(value: Any) -> bool:
    try:
        to_jsonable_python(value)
    except (ValueError, RecursionError):
        return False
    return True
