"""Whether a type reads again what it writes: a job's payload is read after its producer has gone."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

_TYPE: Final = re.compile(r"'type': '([\w-]+)'")
_SURE_TYPES: Final = frozenset(
    """
    any bool computed-field dataclass dataclass-args dataclass-field date datetime decimal default
    definition-ref definitions dict enum float frozenset int list literal model model-field model-fields none
    nullable set str time timedelta tuple typed-dict typed-dict-field union uuid
    """.split()  # noqa: SIM905 -- a list would take a line for each
)
_OF_ITS_OWN: Final = re.compile(
    "'serialization(?:_exclude|_exclude_if)?':|'custom_init': True|'init': False|'init_only': True"
    "|'dict', 'keys_schema': (?!{'type': 'str'})"
)
"""In a schema: code that writes, fields that are not written or not read, and keys that may not be text."""


def is_surely_readable(adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type can read whatever it writes, as far as its schema shows: no own code, for one."""
    schema = repr(adapter.core_schema)
    if _OF_ITS_OWN.search(schema) or not _SURE_TYPES.issuperset(_TYPE.findall(schema)):
        return False
    return schema.count("'type': 'enum'") == schema.count("'sub_type': ")  # the values of others are anything


@lru_cache(maxsize=1000)
def refuses_own_form(adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type does not read what it writes unless ``round_trip`` is set.

    Such are types that forbid further fields and write computed ones, and those that read JSON text.
    """
    schema = repr(adapter.core_schema)
    writes_more = "'computed_fields': [{" in schema and "'forbid'" in schema
    return writes_more or "'type': 'json'" in schema


def may_leave_out(adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type has fields that it does not write."""
    return "'serialization_exclude" in repr(adapter.core_schema)


def left_out(value: Any, again: Any, form: Any, place: str = "") -> str | None:
    """Return the place of a field that has a value and is not in its ``form``, or None.

    Fields whose values are the same in ``again``, which was read from that form, are not meant, nor are those
    that were never given a value.
    """
    if isinstance(value, list | tuple) and isinstance(again, list | tuple) and isinstance(form, list):
        steps = (f"[{number}]" for number in range(len(value)))
        parts = list(zip(steps, value, again, form, strict=False))
    elif isinstance(form, dict):
        parts = []
        others = _fields(again)
        for name, part in _fields(value, given=True).items():
            key = name if isinstance(name, str) else str(name)
            if name in others and key in form:
                parts.append((f".{key}", part, others[name], form[key]))
            elif name in others and key is name and part != others[name]:
                return f"{place}.{name}"
    else:
        return None
    for step, part, other, written in parts:
        if found := left_out(part, other, written, place + step):
            return found
    return None


def _fields(value: Any, *, given: bool = False) -> Mapping[str, Any]:
    """Return the fields of a model, a dataclass or a dict; ``given``: without a model's defaults."""
    if isinstance(value, BaseModel):
        return {name: part for name, part in value if not given or name in value.model_fields_set}
    if isinstance(value, type) or not is_dataclass(value):
        return value if isinstance(value, Mapping) else {}
    return {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
