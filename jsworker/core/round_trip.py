"""Whether a type reads again what it writes: a job's payload is read after its producer has gone."""

import re
from functools import lru_cache
from typing import Any, Final

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


def is_surely_readable(adapter: TypeAdapter[Any]) -> bool:
    """Return whether a type can read whatever it writes, as far as its schema shows: no own code, for one."""
    schema = _schema(adapter)
    if _OF_ITS_OWN.search(schema) or not _SURE_TYPES.issuperset(_TYPE.findall(schema)):
        return False
    return schema.count("'type': 'enum'") == schema.count("'sub_type': ")  # the values of others are anything


def by_alias(value: Any, adapter: TypeAdapter[Any], *, round_trip: bool) -> bool | None:
    """Return pydantic's ``by_alias`` for writing a value: None, which is as its types say, or False.

    A field's serialization alias need not be a name by which it is read, and then names are written. A value
    that comes back from its own form is left as it is, and so is one that no type reads.
    """
    schema = _schema(adapter)
    if schema == "{'type': 'any'}":
        return None
    if "'serialize_by_alias': True" not in schema:
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
    schema = _schema(adapter)
    if "'computed_fields': [{" not in schema or "'forbid'" not in schema:
        return True
    try:
        adapter.validate_json(adapter.dump_json(value, warnings=False), by_alias=True, by_name=True)
    except Exception:  # noqa: BLE001 -- serializers and validators are the user's
        return False
    return True


@lru_cache(maxsize=1000)
def _schema(adapter: TypeAdapter[Any]) -> str:
    if not adapter.pydantic_complete:
        adapter.rebuild()
    return repr(adapter.core_schema)
