"""Whether a type reads again what it writes: a job's payload is read after its producer has gone."""

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

_TYPE: Final = re.compile(r"'type': '([\w-]+)'")
_SURE_TYPES: Final = frozenset(
    """
    any bool computed-field dataclass dataclass-args dataclass-field date datetime decimal default
    definition-ref definitions dict enum float int list literal model model-field model-fields none
    nullable str time timedelta tuple typed-dict typed-dict-field union uuid
    """.split()  # noqa: SIM905 -- a list would take a line for each
)
_OF_ITS_OWN: Final = re.compile(
    "'serialization(?:_exclude|_exclude_if)?':|'custom_init': True|'init': False|'init_only': True"
    "|'post_init':|'dict', 'keys_schema': (?!{'type': 'str'})"
)
"""In a schema: code that writes, fields that are not written or not read, and keys that may not be text."""


class _Facts(NamedTuple):
    """What a type's schema shows; the schema's text may be long and is not kept."""

    is_anything: bool
    uses_aliases: bool
    may_refuse_own_form: bool
    is_surely_readable: bool


@lru_cache(maxsize=1000)
def _facts(adapter: TypeAdapter[Any]) -> _Facts:
    if not adapter.pydantic_complete:
        adapter.rebuild()
    schema = repr(adapter.core_schema)
    has_own = _OF_ITS_OWN.search(schema) or not _SURE_TYPES.issuperset(_TYPE.findall(schema))
    # Members of an enum without a sub_type may have any value.
    has_odd_enums = schema.count("'type': 'enum'") != schema.count("'sub_type': ")
    return _Facts(
        schema == "{'type': 'any'}",
        "'serialize_by_alias': True" in schema,
        "'computed_fields': [{" in schema and "'forbid'" in schema,
        not has_own and not has_odd_enums,
    )


def is_surely_readable(adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type can read whatever it writes, as far as its schema shows: no own code, for one."""
    return _facts(adapter).is_surely_readable


def by_alias(value: Any, adapter: TypeAdapter[Any], *, round_trip: bool) -> bool | None:
    """Return pydantic's ``by_alias`` for writing a value: None, which is as its types say, or False.

    A field's serialization alias need not be a name by which it is read, and then names are written. A value
    that comes back from its own form is left as it is, and so is one that no type reads.
    """
    facts = _facts(adapter)
    if facts.is_anything:
        return None
    if not facts.uses_aliases:
        return False
    try:
        text = adapter.dump_json(value, round_trip=round_trip, warnings=False)
        return None if adapter.validate_json(text, by_alias=True, by_name=True) == value else False
    except Exception:  # noqa: BLE001 -- serializers and validators are the user's
        return False


def is_read_again(value: Any, adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type reads what it writes of a value without ``round_trip``.

    One that forbids further fields does not read the computed ones that it writes.
    """
    if not _facts(adapter).may_refuse_own_form:
        return True
    try:
        adapter.validate_json(adapter.dump_json(value, warnings=False), by_alias=True, by_name=True)
    except Exception:  # noqa: BLE001 -- serializers and validators are the user's
        return False
    return True
