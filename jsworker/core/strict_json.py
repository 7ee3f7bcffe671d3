"""JSON as PostgreSQL's jsonb and every other reader can take it: finite, shallow, valid Unicode, no NUL.

Results and models are written as pydantic writes them, and then checked likewise.
"""

import inspect
import json
import math
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Never, NoReturn, TypedDict, TypeVar, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_json, to_jsonable_python

from jsworker.core.errors import InvalidJson
from jsworker.core.names import printable, shown
from jsworker.core.round_trip import by_alias, is_read_again

MAX_DEPTH = 100
"""Deepest nesting of objects and arrays."""

ASTERISKS: Final = "*" * 10
"""What pydantic writes for a secret."""

_MAX_NUMBER = 10**308
_LONGEST_PLACE = 100
_MASKED: Final = "a secret, which would be stored as asterisks: store a reference to it, for example its name"
_CONTAINERS: Final = (dict, list, tuple)
_NUMBERS: Final = (int, float, bool)
_KEY: Final = itemgetter(0)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""For subclasses of JSON's types, enums above all: it writes the value that was checked."""
_CONFIG: Final = ConfigDict(ser_json_inf_nan="constants")  # not silently null
ANYTHING: Final = TypeAdapter[Any](Any, config=_CONFIG)
"""Writes results of a ``process`` without a return type."""


class Written(TypedDict):
    """How pydantic writes a value: with aliases (None: as its types say), and without computed fields."""

    by_alias: bool | None
    round_trip: bool


def dumps(value: Any, *, what: str = "value") -> str:
    """Return ``value`` as compact JSON text; ``what`` names it in an error.

    jsonb writes large floats as whole numbers: one of 1e16 or more may come back as an integer that
    stands for the same float.

    Raises:
        InvalidJson: it is no JSON, or holds NaN, an infinity, a number of 1e308 or more, NUL characters,
            lone surrogates, or nests deeper than ``MAX_DEPTH``.
    """
    try:
        is_plain = _check(value, what)
    except InvalidJson as error:
        place, _ = _find(value, _check)
        raise InvalidJson(f"{error}{place}") from None
    return to_json(value).decode() if is_plain else _ENCODER.encode(value)


def dumps_model(value: Any, *, what: str) -> str:
    """Return a pydantic model, or else JSON values, as JSON text."""
    if isinstance(value, BaseModel):
        has_aliases = value.model_config.get("serialize_by_alias")
        adapter = adapter_of(type(value)) if has_aliases else ANYTHING
        return write(value, adapter, what, round_trip=True, secrets=False)
    return dumps(value, what=what)


def write(
    value: Any, adapter: TypeAdapter[Any], what: str, *, round_trip: bool = False, secrets: bool = True
) -> str:
    """Return a value as pydantic writes it, as JSON text; ``secrets`` and errors as for ``refuse_lost``."""
    how: Written = {"by_alias": by_alias(value, adapter, round_trip=round_trip), "round_trip": round_trip}
    form = json_form(value, adapter, what, how)
    text = dumps(form, what=what)
    refuse_equal_keys(value, text, adapter, what, how)
    if "null" in text or ASTERISKS in text:
        refuse_lost(value, form, adapter, what, how, secrets=secrets)
    return text


def refuse_equal_keys(value: Any, text: str, adapter: TypeAdapter[Any], what: str, how: Written) -> None:
    """Raise InvalidJson if two keys of a dict are the same in JSON, for example 1 and "1".

    ``text`` has the last of them only. What pydantic writes as text itself has both.
    """
    try:
        written = adapter.dump_json(value, warnings=False, **how)
    except (ValueError, RecursionError):
        return
    if len(written) != (len(text) if text.isascii() else len(text.encode())):
        loads(written, what=what)


def refuse_lost(
    value: Any,
    form: Any,
    adapter: TypeAdapter[Any],
    what: str,
    how: Written,
    *,
    secrets: bool = False,
) -> None:
    """Raise InvalidJson if pydantic has written NaN or an infinity as null, or a secret as asterisks.

    The error names the place. With ``secrets`` these may be written so.
    """
    parts = adapter.dump_python(value, warnings=False, **how)
    for fault, place in _lost(parts, form):
        if not (secrets and fault is _MASKED):
            raise InvalidJson(f"{what} holds {fault}{_where(place)}")


def write_result(value: Any, adapter: TypeAdapter[Any]) -> str:
    """Return the result of ``process`` as JSON text; a value of another type is written by its own type."""
    if adapter is ANYTHING:
        try:
            return dumps(value, what="result")
        except InvalidJson:
            pass  # pydantic may know a JSON form
    return write(value, adapter, "result", round_trip=not is_read_again(value, adapter))


def read_result(text: str, adapter: TypeAdapter[Any]) -> Any:
    """Return a result as a type, from its JSON text; raise InvalidJson if it does not fit the type."""
    try:
        return adapter.validate_json(text, by_alias=True, by_name=True)
    except ValidationError as error:
        says, _ = misfit(error)
        raise InvalidJson(f"its result does not fit the return type: {says}") from None


def misfit(error: ValidationError) -> tuple[str, str]:
    """Return why a value does not fit its type: in words, and without the names of its fields.

    Neither quotes the value, but the text of a validator of the user's own is in the first as it is.
    """
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    first = faults[0]
    place = ".".join(printable(str(part), 80) for part in first["loc"]) or "the whole value"
    # The only message of pydantic's own that contains the value:
    tag = first["type"] == "union_tag_invalid"
    rule = "Input tag is none of the expected tags" if tag else printable(first["msg"], 300)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {rule}{more}", f"{first['type']}{more}"


def json_form(value: Any, adapter: TypeAdapter[Any], what: str, how: Written) -> Any:
    """Return the JSON values by which pydantic writes a value."""
    try:
        # Without warnings: they would show values.
        return adapter.dump_python(value, mode="json", warnings=False, **how)
    except (ValueError, RecursionError):
        raise InvalidJson(f"{what} holds {_unwritable(value, adapter)}") from None


def result_type(
    process: Callable[..., Any], arguments: Mapping[Any, Any] = MappingProxyType({})
) -> TypeAdapter[Any]:
    """Return the adapter that writes the results of a ``process`` method.

    Type variables of its return annotation stand for these ``arguments``, all others for any JSON value.

    Raises PydanticUserError when that annotation names a type that has no JSON form.
    """
    try:
        annotation = typing.get_type_hints(inspect.unwrap(process), include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 -- names that only a type checker sees, say
        return ANYTHING
    if get_origin(annotation) in {Awaitable, Coroutine}:
        annotation = get_args(annotation)[-1]
    annotation = substituted(annotation, arguments)
    # Of a type variable's bound pydantic would read that model's own fields only.
    annotation = substituted(annotation, dict.fromkeys(_left_open(annotation), Any))
    if annotation in (Any, None, type(None), NoReturn, Never, object):
        return ANYTHING
    return adapter_of(annotation)


def substituted(annotation: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return a type with these arguments for its type variables."""
    if isinstance(annotation, TypeVar):
        return arguments.get(annotation, annotation)
    variables = variables_of(annotation)
    if arguments.keys().isdisjoint(variables):
        return annotation
    return annotation[tuple(arguments.get(each, each) for each in variables)]


def variables_of(annotation: Any) -> tuple[Any, ...]:
    """Return the type variables within a type; a generic class without arguments has none.

    But a generic model has: for pydantic, the model and the model of its own type variables are the same.
    """
    if isinstance(annotation, TypeVar):
        return (annotation,)
    of_model: Any = getattr(annotation, "__pydantic_generic_metadata__", {})
    found: tuple[Any, ...] = of_model.get("parameters") or ()
    return found if isinstance(annotation, type) else getattr(annotation, "__parameters__", ())


def _left_open(annotation: Any) -> tuple[Any, ...]:
    """Return the type variables within a type; a generic class or model without arguments has none."""
    of_model: Any = getattr(annotation, "__pydantic_generic_metadata__", {})
    return () if of_model and not of_model.get("args") else variables_of(annotation)


def adapter_of(annotation: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes values of a type; to make it takes longer than to use it.

    Raises PydanticUserError, or NameError for a name that is not defined, when the type cannot be used.
    """
    try:
        # Unions in another order are equal, but of members that fit alike pydantic takes the first.
        return _kept_adapter(annotation, repr(annotation))
    except TypeError:  # some of its metadata cannot be hashed
        return _new_adapter(annotation)


@lru_cache(maxsize=200)  # limited, because functions may define types of their own in each call
def _kept_adapter(annotation: Any, _written: str) -> TypeAdapter[Any]:
    return _new_adapter(annotation)


def _new_adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        adapter = TypeAdapter(annotation, config=_CONFIG)
    except PydanticUserError:  # models, dataclasses and TypedDicts have a configuration of their own
        adapter = TypeAdapter(annotation)
    adapter.rebuild(_types_namespace={})  # finds undefined names now, and takes none of this module's
    return adapter


def plain(value: Any) -> Any:
    """Return an id as text, a time in ISO 8601 in UTC, a duration in seconds; other values as they are."""
    match value:
        case UUID():
            return str(value)
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case _:
            return value


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
    _check(value, what)
    return value


def as_stored(text: str) -> Any:
    """Return the value of a JSON text as PostgreSQL's jsonb gives it back.

    Keys come in the order of their length in UTF-8, those of one length in that of their characters, and
    the last of equal keys counts. Numbers are written without an exponent, so that large floats are integers,
    and there is no negative zero.
    """
    return json.loads(text, object_pairs_hook=_stored_object, parse_float=_stored_number)


def _stored_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > 1:
        # Two sorts are faster than one by pairs. The order of characters is that of their bytes in UTF-8.
        pairs.sort(key=_KEY)
        pairs.sort(key=lambda pair: len(pair[0].encode()))
    return dict(pairs)


def _stored_number(text: str) -> int | float:
    if "e" in text or "E" in text:
        text = format(Decimal(text), "f")
    return float(text) + 0.0 if "." in text else int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidJson(f"holds a key twice in one object: {shown(key)}")
    return found


def _constant(name: str) -> None:
    raise InvalidJson(f"holds {name}, which JSON does not know")


def _cause(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return "a number has too many digits"


def _check(value: Any, what: str = "", depth: int = 0) -> bool:
    """Raise if a value cannot be stored; return whether all of its parts are exactly of JSON's types."""
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidJson(f"{what} holds \\u0000, which PostgreSQL cannot store")
        if not value.isascii():
            _check_unicode(value, what)
        return type(value) is str
    if isinstance(value, _NUMBERS):
        if not -_MAX_NUMBER < value < _MAX_NUMBER:
            finite = isinstance(value, int) or math.isfinite(value)
            fault = "a number of 1e308 or more" if finite else f"{value}, which is not a finite number"
            raise InvalidJson(f"{what} holds {fault}")
        return type(value) in _NUMBERS
    if isinstance(value, _CONTAINERS):
        return _check_parts(value, what, depth)
    if value is not None:
        raise InvalidJson(f"{what} holds {_without_form(value)}")
    return True


def _check_parts(value: Any, what: str, depth: int) -> bool:
    if depth >= MAX_DEPTH:
        raise InvalidJson(f"{what} nests deeper than {MAX_DEPTH} levels")
    plain = type(value) in _CONTAINERS
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InvalidJson(f"{what} holds a key of type {type(key).__name__}; keys must be strings")
            plain = _check(key, what) and plain
        value = value.values()
    for part in value:
        plain = _check(part, what, depth + 1) and plain
    return plain


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidJson(f"{what} holds a lone surrogate, which is no valid Unicode") from None


def _lost(part: Any, written: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield what pydantic has written as null or as asterisks, and the place of it."""
    if written is None:
        if isinstance(part, float) and not math.isfinite(part):
            yield f"{part}, which is not a finite number", place
    elif written == ASTERISKS:
        if hasattr(part, "get_secret_value"):
            yield _MASKED, place
    elif isinstance(part, dict) and isinstance(written, dict):
        for (key, each), form in zip(part.items(), written.values(), strict=False):
            yield from _lost(each, form, f"{place}.{key}")
    elif isinstance(part, (*_CONTAINERS, set, frozenset)) and isinstance(written, list):
        for number, (each, form) in enumerate(zip(part, written, strict=False)):
            yield from _lost(each, form, f"{place}[{number}]")


def _unwritable(value: Any, adapter: TypeAdapter[Any]) -> str:
    """Return in words which part of a value has no JSON form, and where it is."""
    circle = f"a circle, or nests deeper than {MAX_DEPTH} levels"
    try:
        parts = adapter.dump_python(value, warnings=False)
        place, part = _find(parts, to_jsonable_python)
    except (ValueError, RecursionError):
        return circle
    if not place and part is not parts:
        return circle
    return f"{_without_form(part)}{place}"


def _without_form(value: Any) -> str:
    if isinstance(value, Coroutine):
        return "a coroutine that was never awaited"
    return f"a value of type {type(value).__name__}, which is no JSON"


def _find(value: Any, check: Callable[[Any], object]) -> tuple[str, Any]:
    """Return the place, in words, of the first part in dicts and lists that fails a check, and the part."""
    place = ""
    for _ in range(MAX_DEPTH):
        is_dict = isinstance(value, dict)
        steps = value.items() if is_dict else enumerate(value if isinstance(value, _CONTAINERS) else ())
        wrong = next((step for step in steps if _raises(check, step[1])), None)
        if wrong is None:
            return _where(place), value
        place += f".{wrong[0]}" if is_dict else f"[{wrong[0]}]"
        value = wrong[1]
    return "", value  # a circle, or nested too deep: no single place is the wrong one


def _where(place: str) -> str:
    return f" (at {printable(place.removeprefix('.'), _LONGEST_PLACE)})" if place else ""


def _raises(check: Callable[[Any], object], part: Any) -> bool:
    try:
        check(part)
    except (ValueError, RecursionError):
        return True
    return False
