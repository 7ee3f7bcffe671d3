"""``as_stored`` against PostgreSQL: what it makes of a JSON text is what a jsonb column gives back."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import Connection

from jsworker.core.strict_json import as_stored, dumps

# Keys of equal and of different lengths, whose order by characters is not that by bytes of UTF-16.
keys = st.text(st.sampled_from('abZ0 "\\é\u2028\uffff\U00010000'), max_size=4)
numbers = (
    st.integers(-(10**308) + 1, 10**308 - 1)
    | st.floats(-9.9e307, 9.9e307)
    | st.sampled_from([0.0, -0.0, 1e15, 1e16, 1.5e16, 1e22, 1e23, 1e-5, 1e-7, 5e-324, 0.1, 1.0, 10.0])
)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def connection(server_url: str) -> Iterator[Connection[Any]]:
    with psycopg.connect(server_url, autocommit=True) as opened:
        yield opened


def through_jsonb(connection: Connection[Any], text: str) -> Any:
    row = connection.execute("SELECT %s::jsonb::text", [text]).fetchone()
    assert row is not None
    return json.loads(row[0])


def told_apart(value: Any) -> str:
    """Return a value with the order of its keys, and the types and signs of its numbers."""
    return repr(value)


@settings(deadline=None, max_examples=300)
@given(values)
def test_a_value_comes_back_as_it_is_said_to(connection: Connection[Any], value: Any) -> None:
    text = dumps(value)
    said = as_stored(text)
    assert told_apart(said) == told_apart(through_jsonb(connection, text))
    again = dumps(said)
    assert told_apart(as_stored(again)) == told_apart(said)  # it is stored as it is from then on


@pytest.mark.parametrize(
    "text",
    [
        "-0.0",
        "-0",
        "-0.0e5",
        "0E-7",
        "1E-7",
        "1e+22",
        "1.50e1",
        "1.5e1",
        "1.0e0",
        "12.34E-2",
        "123456789012345678901234567890.5e-3",
        "1" * 308,
        "0." + "3" * 400,
        '{"b": 1, "a": 2, "b": 3}',
        '{"a": 1, "\\u0061": {"y": 1, "x": [{"cc": 1, "b": 2}]}}',
        '{"é": 1, "zz": 2, "z": 3, "\\ud83d\\ude00": 4, "\uffff": 5, "aaaa": 6, "": 7}',
    ],
)
def test_a_text_of_others_too(connection: Connection[Any], text: str) -> None:
    assert told_apart(as_stored(text)) == told_apart(through_jsonb(connection, text))
