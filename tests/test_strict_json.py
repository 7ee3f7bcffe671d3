"""Strict JSON: what is accepted survives jsonb unchanged; everything else is refused in one line."""

import asyncio
import json
import math
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, model_serializer

from jsworker.core.errors import InvalidJson
from jsworker.core.strict_json import ANYTHING, MAX_DEPTH, adapter_of, dumps, loads, write_result

unhurried = settings(deadline=None)  # the machine may be busy

storable_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
any_text = st.text(st.characters() | st.sampled_from("\0\ud800\udfff\u2028\x1b"), max_size=20)
small_floats = st.floats(-9.9e307, 9.9e307)
storable = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**308) + 1, 10**308 - 1) | small_floats | storable_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(storable_text, inner, max_size=4),
    max_leaves=20,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary() | st.just(10**308),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(any_text | st.integers(), inner, max_size=4)
        | st.sets(st.integers(), max_size=2)
    ),
    max_leaves=20,
)


def through_jsonb(text: str) -> str:
    """Return JSON text as PostgreSQL gives it back: numbers as numeric, no NUL, the last of equal keys."""

    def numeric(written: str) -> str:
        value = Decimal(written)
        return format(value or abs(value), "f")  # numeric knows no exponent and no negative zero

    def write(value: Any) -> str:
        match value:
            case Decimal():
                return numeric(str(value))
            case dict():
                pairs = (f"{json.dumps(key)}: {write(item)}" for key, item in sorted(value.items()))
                return "{" + ", ".join(pairs) + "}"
            case list():
                return f"[{', '.join(write(item) for item in value)}]"
            case _:
                return json.dumps(value)

    assert "\\u0000" not in text
    text.encode()  # no lone surrogate
    return write(json.loads(text, parse_int=Decimal, parse_float=Decimal))


def same(before: Any, after: Any) -> bool:
    """Compare JSON values; a float may have become the integer that stands for it."""
    match before:
        case dict():
            return before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)
        case list():
            return len(before) == len(after) and all(map(same, before, after))
        case float():
            return isinstance(after, int | float) and float(after) == before
        case _:
            return type(before) is type(after) and bool(before == after)


@unhurried
@given(storable)
def test_what_json_knows_comes_back_unchanged(value: Any) -> None:
    text = dumps(value)
    assert loads(text) == value
    assert loads(text.encode()) == value
    assert dumps(loads(text)) == text  # tells 1, 1.0 and True apart


@unhurried
@given(anything)
def test_what_is_accepted_survives_jsonb(value: Any) -> None:
    try:
        text = dumps(value)
    except InvalidJson:
        return
    assert same(value, loads(through_jsonb(text)))


@unhurried
@given(st.text() | st.binary() | st.text('[]{}",:0123456789eE+-.\\u truefalsnN', max_size=30))
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    value, fault = None, ""
    try:
        value = loads(text, what="message")
    except InvalidJson as error:
        fault = str(error)
    if fault:
        assert fault.startswith("message ")
        assert "\n" not in fault
    else:
        assert loads(dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (math.nan, "holds nan, which is not a finite number"),
        ([-math.inf], "holds -inf, which is not a finite number (at [0])"),
        (10**308, "holds a number of 1e308 or more"),
        (-(10**308), "holds a number of 1e308 or more"),
        (1.5e308, "holds a number of 1e308 or more"),
        ({"a": "x\0"}, r"holds \u0000, which PostgreSQL cannot store (at a)"),
        ({"\0": 1}, r"holds \u0000, which PostgreSQL cannot store"),
        ("\ud800", "holds a lone surrogate, which is no valid Unicode"),
        ({1: "x"}, "holds a key of type int; keys must be strings"),
        ({"a": b"x"}, "holds a value of type bytes, which is no JSON (at a)"),
        ({"a": [0, {"b\n": {1}}]}, r"holds a value of type set, which is no JSON (at a[1].b\n)"),
    ],
)
def test_what_cannot_be_stored_is_refused(value: Any, fault: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        dumps(value, what="payload")
    assert str(caught.value) == f"payload {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a":1,"a":2}', "holds a key twice in one object: 'a'"),
        ('[{"b":{"c":1,"a":1,"a":1}}]', "holds a key twice in one object: 'a'"),
        ("[NaN]", "holds NaN, which JSON does not know"),
        ("-Infinity", "holds -Infinity, which JSON does not know"),
        ("1e999", "holds inf, which is not a finite number"),
        ("1.5e308", "holds a number of 1e308 or more"),
        ("1" * 309, "holds a number of 1e308 or more"),
        ("1" * 5000, "is not valid JSON: a number has too many digits"),
        ('"\\u0000"', r"holds \u0000, which PostgreSQL cannot store"),
        ('"\\ud800"', "holds a lone surrogate, which is no valid Unicode"),
        ("{", "is not valid JSON: Expecting property name enclosed in double quotes at character 1"),
        ("", "is not valid JSON: Expecting value at character 0"),
        (b'"\xff"', "is not valid JSON: byte 1 is not UTF-8"),
        ("[" * 101 + "]" * 101, "nests deeper than 100 levels"),
        ("[" * 200_000 + "]" * 200_000, "nests deeper than 100 levels"),
        ('{"a":' * 200_000 + "1" + "}" * 200_000, "nests deeper than 100 levels"),
    ],
)
def test_bad_text_is_refused(text: str | bytes, fault: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        loads(text, what="payload")
    assert str(caught.value) == f"payload {fault}"


class Keyed(BaseModel):
    given: dict[int | str | None, int]


class Short(BaseModel):
    first: int = 1
    second: int = 2

    @model_serializer(when_used="json")
    def write(self) -> dict[str, int]:
        return {"first": self.first}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({1: 2, "1": 3}, "1"),
        ([{"a": {None: "é", "None": 3}}], "None"),
        (Keyed(given={1: 2, "1": 3}), "1"),
        ({"a": Keyed(given={None: 2, "None": 3})}, "None"),
    ],
)
def test_keys_that_are_the_same_in_json_are_refused(value: Any, key: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        write_result(value, adapter_of(Any))
    assert str(caught.value) == f"result holds a key twice in one object: '{key}'"
    with pytest.raises(InvalidJson, match="a key twice"):
        write_result(value, adapter_of(type(value)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: 2, "2": "é"}, '{"1":2,"2":"é"}'),
        (Keyed(given={1: 2, "2": 3, None: 4}), '{"given":{"1":2,"2":3,"None":4}}'),
        ([Short()], '[{"first":1}]'),
    ],
)
def test_other_keys_are_written_as_text(value: Any, text: str) -> None:
    assert write_result(value, adapter_of(Any)) == text


def test_depth_ends_at_the_limit() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert loads(dumps(value)) == value
    with pytest.raises(InvalidJson, match="nests deeper than 100 levels"):
        dumps([value])


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    with pytest.raises(InvalidJson, match="nests deeper than 100 levels"):
        dumps(circle)


def test_tuples_are_written_as_arrays_and_text_stays_compact_unicode() -> None:
    assert dumps({"a": (1, "ü")}) == '{"a":[1,"ü"]}'


def test_refusals_do_not_show_the_value() -> None:
    with pytest.raises(InvalidJson) as caught:
        loads('{"password": "s3cret", }')
    assert "s3cret" not in str(caught.value)


class Number(int, Enum):
    ONE = 1, "eins"

    def __new__(cls, number: int, label: str) -> Self:
        made = int.__new__(cls, number)
        made._value_ = label
        return made


class Colour(str, Enum):  # noqa: UP042 -- as older programs write it
    RED = "red", math.nan

    def __new__(cls, name: str, amount: float) -> Self:
        made = str.__new__(cls, name)
        made._value_ = (name, amount)
        return made


@dataclass
class Tags(list[int]):
    owner: str


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x": Number.ONE}, '{"x":1}'),
        ([Colour.RED], '["red"]'),
        ({Colour.RED: 2}, '{"red":2}'),
        ({"a": [{"b": Odd(c=1)}]}, '{"a":[{"b":{"c":1}}]}'),
        ((1.5, True, None), "[1.5,true,null]"),
    ],
)
def test_subclasses_are_written_as_what_was_checked(value: Any, text: str) -> None:
    assert dumps(value) == text


def test_a_list_with_fields_is_a_list() -> None:
    tags = Tags("x")
    tags.append(1)
    assert dumps({"tags": tags}) == '{"tags":[1]}'


def test_a_coroutine_in_a_result_is_named_as_what_it_is() -> None:
    with closing(asyncio.sleep(0)) as call:
        for adapter in (ANYTHING, adapter_of(dict[str, Any])):
            with pytest.raises(
                InvalidJson, match=r"^result holds a coroutine that was never awaited \(at a\[0\]\)$"
            ):
                write_result({"a": [call]}, adapter)


def test_the_adapter_of_a_type_is_made_once() -> None:
    assert adapter_of(list[Decimal]) is adapter_of(list[Decimal])
    assert adapter_of(int | str) is not adapter_of(str | int)  # equal for Python, not for pydantic
    assert adapter_of(Annotated[int, []]).validate_json("1") == 1  # metadata without a hash
