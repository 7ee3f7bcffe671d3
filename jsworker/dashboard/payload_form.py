"""Fields of a form for a payload, made from the JSON schema of its model, and the payload made from the form.

Values without an input of their own (lists, deeper objects) and payloads without a model are entered as JSON.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from markupsafe import Markup
from pydantic import ValidationError
from pydantic.errors import PydanticUserError

from jsworker.core.errors import InvalidTarget
from jsworker.core.names import printable
from jsworker.core.processor import JobProcessor, payload_type
from jsworker.core.strict_json import dumps, loads
from jsworker.dashboard.visit import TEMPLATES

WHOLE: Final = "payload"
"""The field for the whole payload as JSON; the others are ``payload.NAME`` and ``payload.NAME.NAME``."""

Input: TypeAlias = Literal["text", "long", "secret", "date", "whole", "number", "choice", "json", "group"]

_INPUTS: Final[Mapping[tuple[Any, Any], Input]] = {
    ("string", "date"): "date",
    ("string", "password"): "secret",
    ("string", None): "text",
    ("integer", None): "whole",
    ("number", None): "number",
}
"""By type and format of the schema."""
_TEMPLATE: Final[Any] = TEMPLATES.get_template("payload_fields.html").module
_LONG_CHARACTERS: Final = 200
_MOST_CHOICES: Final = 200
_LONGEST_HINT: Final = 300
_LONGEST_FAULT: Final = 200


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form.

    Attributes:
        name: within the form.
        title: for people.
        input: the kind of its input.
        required: whether the payload must have it.
        nullable: whether it may be null; an empty field that is required, and no text, then means null.
        default: its value in a new form; None: nothing is shown.
        hint: its description in the model.
        choices: the values of a ``choice`` as JSON, each with the words for it.
        limits: ``min``, ``max`` and ``maxlength`` for the browser.
        fields: those of a ``group``.
    """

    name: str
    title: str
    input: Input
    required: bool = False
    nullable: bool = False
    default: Any = None
    hint: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    fields: Sequence["Field"] = ()

    @property
    def shown(self) -> str:
        """The default, as the input shows it."""
        if self.default is None:
            return ""
        return dumps(self.default) if self.input in {"json", "choice"} else str(self.default)


def fields_of(processor: type[JobProcessor[Any]] | None) -> list[Field]:
    """Return the fields for a payload; if no model names them, one field for the whole payload as JSON."""
    whole = [Field(WHOLE, "Payload, as JSON", "json", required=True, default={})]
    if processor is None:
        return whole
    try:
        schema = payload_type(processor).json_schema()
    except (InvalidTarget, PydanticUserError):  # unusable, or JSON Schema cannot describe it
        return whole
    root = _resolved(schema, schema)
    return list(_fields(root, schema, WHOLE, depth=0)) or whole


def read_form(
    processor: type[JobProcessor[Any]] | None, form: Mapping[str, Any]
) -> tuple[Any, dict[str, str]]:
    """Return the payload of a form, and its errors by the names of fields.

    Errors that belong to no field are under ``WHOLE``.
    """
    errors: dict[str, str] = {}
    fields = fields_of(processor)
    payload = _value(fields[0], form, errors) if fields[0].name == WHOLE else _object(fields, form, errors)
    if processor is None or errors:
        return payload, errors
    names = set(_names(fields))
    try:
        payload_type(processor).validate_json(dumps(payload), by_alias=True, by_name=True)
    except ValidationError as error:
        for each in error.errors(include_url=False, include_input=False, include_context=False):
            place = [WHOLE, *map(str, each["loc"])]
            # The innermost field that contains the fault.
            name = next(
                (n for end in range(len(place), 0, -1) if (n := ".".join(place[:end])) in names), WHOLE
            )
            within = "" if name == ".".join(place) else f"{'.'.join(place[1:])}: "
            errors.setdefault(name, printable(f"{within}{each['msg']}", _LONGEST_FAULT))
    return payload, errors


def form_fields(
    fields: Sequence[Field], given: Mapping[str, Any] | None = None, errors: Mapping[str, str] | None = None
) -> Markup:
    """Return the inputs of fields, with the values ``given`` before, else their defaults, and with errors."""
    shown = errors or {}
    drawn = [_TEMPLATE.field(each, given, shown) for each in fields]
    if WHOLE in shown and all(each.name != WHOLE for each in fields):
        drawn.insert(0, Markup('<p class="error" role="alert">{}</p>').format(shown[WHOLE]))
    return Markup("").join(drawn)


def _fields(
    schema: Mapping[str, Any], root: Mapping[str, Any], prefix: str, *, depth: int
) -> Iterator[Field]:
    required = schema.get("required", ())
    for name, found in schema.get("properties", {}).items():
        inner, nullable = _without_null(_resolved(found, root), root)
        way, place = _input(inner, depth, found.get("default")), f"{prefix}.{name}"
        limits = {
            "min": inner.get("minimum"),
            "max": inner.get("maximum"),
            "maxlength": inner.get("maxLength"),
        }
        choices = _choices(inner) if way == "choice" else ()
        hint = found.get("description") or inner.get("description") or ""
        yield Field(
            name=place,
            title=name,
            input=way,
            required=name in required,
            nullable=nullable,
            default=found.get("default"),
            hint=printable(str(hint), _LONGEST_HINT),
            choices={dumps(each): each if isinstance(each, str) else dumps(each) for each in choices},
            limits={key: value for key, value in limits.items() if isinstance(value, int | float)},
            fields=list(_fields(inner, root, place, depth=depth + 1)) if way == "group" else (),
        )


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference names; only the model's own definitions are looked up."""
    for _ in range(8):  # the bound ends a cycle of references
        name = schema.get("$ref")
        if name is None and len(schema.get("allOf", ())) == 1:
            name = schema["allOf"][0].get("$ref")
        if name is None:
            return schema
        schema = root.get("$defs", {}).get(str(name).removeprefix("#/$defs/"), {})
    return {}


def _without_null(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    ways = schema.get("anyOf", ())
    left = [way for way in ways if way.get("type") != "null"]
    if len(left) == 1 and len(ways) == 2:
        return _resolved(left[0], root), True
    return schema, False


def _input(schema: Mapping[str, Any], depth: int, default: Any) -> Input:
    if 0 < len(_choices(schema)) <= _MOST_CHOICES:
        return "choice"
    way = _INPUTS.get((schema.get("type"), schema.get("format"))) or _INPUTS.get(
        (schema.get("type"), None), "json"
    )
    if way == "text" and (schema.get("maxLength", 0) > _LONG_CHARACTERS or "\n" in str(default)):
        return "long"  # browsers take newlines out of the value of other inputs
    if schema.get("type") == "object" and schema.get("properties") and depth == 0:
        return "group"
    return way


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    if schema.get("type") == "boolean":
        return (True, False)
    return schema.get("enum") or ([schema["const"]] if "const" in schema else ())


def _names(fields: Sequence[Field]) -> Iterator[str]:
    for each in fields:
        yield each.name
        yield from _names(each.fields)


def _object(fields: Sequence[Field], form: Mapping[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields:
        value = _value(each, form, errors)
        if value is not _LEFT_OUT:
            found[each.title] = value
    return found


_LEFT_OUT: Final = object()


def _value(asked: Field, form: Mapping[str, Any], errors: dict[str, str]) -> Any:
    if asked.input == "group":
        if not asked.required and not any(str(form.get(name, "")).strip() for name in _names(asked.fields)):
            return _LEFT_OUT
        return _object(asked.fields, form, errors)
    text = str(form.get(asked.name, ""))
    if not text.strip() and not (asked.required and asked.input in {"text", "long", "secret"}):
        if asked.required and not asked.nullable:
            errors[asked.name] = "a value is needed"
        return None if asked.required else _LEFT_OUT
    try:
        return _parsed(asked.input, text)
    except ValueError as error:
        errors[asked.name] = printable(str(error), _LONGEST_FAULT)
        return None


def _parsed(way: Input, text: str) -> Any:
    match way:
        case "whole":
            try:
                return int(text)
            except ValueError:
                raise ValueError("it must be a whole number") from None
        case "number":
            try:
                value = float(text)
            except ValueError:
                raise ValueError("it must be a number") from None
            if not math.isfinite(value):
                raise ValueError("it must be a finite number")
            return value
        case "json" | "choice":
            return loads(text, what="it")
        case "long":
            return text.replace("\r\n", "\n")  # as browsers send them
    return text
