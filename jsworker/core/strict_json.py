"""JSON as PostgreSQL's jsonb and every other reader can take it: finite, shallow, valid Unicode, no NUL.

Results and models are written as pydantic writes them, and then checked likewise.
"""

import inspect
import json
import math
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, Never, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from jsworker.core.errors import InvalidJson
from jsworker.core.names import printable

MAX_DEPTH = 100
"""Deepest nesting of objects and arrays."""

_MAX_NUMBER = 10**308
_LONGEST_PLACE = 100
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""For subclasses of what JSON knows, enums above all: it writes what was checked."""
_CONFIG: Final = ConfigDict(ser_json_inf_nan="constants")  # not silently null
_CYCLE: Final = f"result holds a circle, or nests deeper than {MAX_DEPTH} levels"
ANYTHING: Final = TypeAdapter[Any](Any, config=_CONFIG)
"""Writes results of a ``process`` without a return type."""


def dumps(value: Any, *, what: str = "value") -> str:
    """Return ``value`` as compact JSON text; ``what`` names it in an error.

    jsonb writes large floats as whole numbers: one of 1e16 or more may come back as an integer that
    stands for the same float.

    Raises:
        InvalidJson: it is no JSON, or holds NaN, an infinity, a number of 1e308 or more, NUL characters,
            lone surrogates, or nests deeper than ``MAX_DEPTH``.
    """
    try:
        is_plain = _check(value, what, 0)
    except InvalidJson as error:
        place, _ = find(value, lambda part: not _fits(part))
        raise InvalidJson(f"{error}{place}") from None
    return to_json(value).decode() if is_plain else _ENCODER.encode(value)


def find(value: Any, is_wrong: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return where in a value of dicts and lists the first wrong part is, in words, and the part."""
    place = ""
    for _ in range(MAX_DEPTH):
        parts: Iterable[tuple[Any, Any]]
        match value:
            case dict():
                parts = ((f".{key}" if place else str(key), part) for key, part in value.items())
            case list() | tuple():
                parts = ((f"[{index}]", part) for index, part in enumerate(value))
            case _:
                break
        for step, part in parts:
            if is_wrong(part):
                place, value = place + step, part
                break
        else:
            break
    else:  # a circle, or what is too deep: each of its places is as wrong as the others
        return "", value
    return (f" (at {printable(place, _LONGEST_PLACE)})" if place else ""), value


def _fits(value: Any) -> bool:
    try:
        _check(value, "", 0)
    except InvalidJson:
        return False
    return True


def loads(text: str | bytes, *, what: str = "value") -> Any:
    """Return the value of a JSON text; it may hold no key twice in one object."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except InvalidJson as error:
        raise InvalidJson(f"{what} {error}") from None
    except RecursionError:
        raise InvalidJson(f"{what} nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # bad JSON, bad UTF-8, an integer of thousands of digits
        raise InvalidJson(f"{what} is not valid JSON: {_cause(error)}") from None
    _check(value, what, 0)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidJson("holds a key twice in one object")
    return found


def _constant(name: str) -> None:
    raise InvalidJson(f"holds {name}, which JSON does not know")


def _cause(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return "a number has too many digits"


def _check(value: Any, what: str, depth: int) -> bool:
    """Raise for what cannot be stored; return whether all else is exactly of JSON's types."""
    exactly = type(value)
    if exactly is str:  # what most payloads are made of; the patterns below take three times as long
        _check_text(value, what)
        return True
    if exactly is int:
        _check_number(value, what)
        return True
    if exactly is dict:
        return _check_dict(value, what, depth)
    return _check_other(value, what, depth)


def _check_dict(value: dict[Any, Any], what: str, depth: int) -> bool:
    _check_depth(what, depth)
    plain = type(value) is dict
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidJson(f"{what} holds a key of type {type(key).__name__}; keys must be strings")
        _check_text(key, what)
        plain = _check(item, what, depth + 1) and type(key) is str and plain
    return plain


def _check_other(value: Any, what: str, depth: int) -> bool:
    match value:
        case None | bool():
            pass
        case str():
            _check_text(value, what)
        case float() if not math.isfinite(value):
            raise InvalidJson(f"{what} holds {value}, which is not a finite number")
        case int() | float():
            _check_number(value, what)
        case dict():
            return _check_dict(value, what, depth)
        case list() | tuple():
            _check_depth(what, depth)
            plain = type(value) in {list, tuple}
            for item in value:
                plain = _check(item, what, depth + 1) and plain
            return plain
        case _:
            raise InvalidJson(f"{what} holds a value of type {type(value).__name__}, which is no JSON")
    return value is None or type(value) in {bool, float}


def _check_number(value: float, what: str) -> None:
    if not -_MAX_NUMBER < value < _MAX_NUMBER:
        raise InvalidJson(f"{what} holds a number of 1e308 or more")


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidJson(f"{what} holds \\u0000, which PostgreSQL cannot store")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidJson(f"{what} holds a lone surrogate, which is no valid Unicode") from None


def _check_depth(what: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidJson(f"{what} nests deeper than {MAX_DEPTH} levels")


def result_type(process: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return the adapter that writes the results of a ``process`` method.

    Raises PydanticUserError when its return annotation names a type that has no JSON form.
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
    """Return what ``process`` returned as JSON text; a value of another type is written by its own type."""
    if adapter is ANYTHING:
        try:
            return dumps(value, what="result")
        except InvalidJson:
            pass  # pydantic may know a JSON form
    try:
        found, finite = _json_form(value, adapter)
    except (ValueError, RecursionError):
        raise InvalidJson(_why_unwritable(value, adapter)) from None
    text = dumps(found, what="result")
    if not finite:
        raise InvalidJson("result holds a number that is not finite")
    return text


def model_values(value: Any, *, what: str) -> Any:
    """Return a pydantic model as the JSON values it is made of, anything else as it is."""
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
        place, part = find(parts, lambda part: not _is_writable(part))
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
