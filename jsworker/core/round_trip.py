"""Whether a type reads again what it writes: a job's payload is read after its producer has gone."""

import re
from functools import lru_cache
from typing import Any, Final

from pydantic import TypeAdapter

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
