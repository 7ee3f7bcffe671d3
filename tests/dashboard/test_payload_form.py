from datetime import date, datetime
from enum import Enum
from html.parser import HTMLParser
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from jsworker.core.errors import InvalidTarget
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.dashboard.payload_form import WHOLE, fields_of, form_fields, read_form


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Address(BaseModel):
    street: str
    number: int = 1


class Order(BaseModel):
    name: str = Field(max_length=20, description="Who has ordered")
    amount: int = Field(ge=1, le=10)
    price: float
    paid: bool = False
    size: Size = Size.SMALL
    mode: Literal["fast", "slow"] | None = None
    day: date | None = None
    at: datetime | None = None
    tags: list[str] = []
    address: Address
    invoice: Address | None = None
    key: SecretStr | None = None


class Ordering(JobProcessor[Order]):
    async def process(self, job: Job[Order]) -> None: ...


class Dangling(JobProcessor["Nowhere"]):  # type: ignore[name-defined]
    async def process(self, job: Any) -> None: ...


class Anything(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None: ...


FILLED = {
    "payload.name": "Ada",
    "payload.amount": "3",
    "payload.price": "2.5",
    "payload.paid": "true",
    "payload.size": '"large"',
    "payload.mode": "",
    "payload.day": "2026-11-25",
    "payload.at": "",
    "payload.tags": '["a", "b"]',
    "payload.address.street": "Main",
    "payload.address.number": "7",
}


def test_a_field_for_each_of_the_model() -> None:
    inputs = {each.title: each.input for each in fields_of(Ordering)}
    assert inputs == {
        "name": "text",
        "amount": "whole",
        "price": "number",
        "paid": "choice",
        "size": "choice",
        "mode": "choice",
        "day": "date",
        "at": "text",
        "tags": "json",
        "address": "group",
        "invoice": "group",
        "key": "secret",
    }


def test_the_form_becomes_the_payload() -> None:
    payload, errors = read_form(Ordering, FILLED)
    assert not errors
    assert payload == {
        "name": "Ada",
        "amount": 3,
        "price": 2.5,
        "paid": True,
        "size": "large",
        "day": "2026-11-25",
        "tags": ["a", "b"],
        "address": {"street": "Main", "number": 7},
    }


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("payload.amount", "many", "it must be a whole number"),
        ("payload.amount", "", "a value is needed"),
        ("payload.amount", "11", "Input should be less than or equal to 10"),
        ("payload.price", "nan", "it must be a finite number"),
        ("payload.name", "x" * 21, "String should have at most 20 characters"),
        ("payload.day", "yesterday", "Input should be a valid date"),
        ("payload.tags", "[1", "it "),
        ("payload.tags", "[1]", "tags.0: Input should be a valid string"),
        ("payload.address.number", "x", "it must be a whole number"),
    ],
)
def test_an_error_stands_at_its_field(field: str, value: str, fault: str) -> None:
    _, errors = read_form(Ordering, FILLED | {field: value})
    assert list(errors) == [field]
    assert errors[field].startswith(fault)
    page = form_fields(fields_of(Ordering), FILLED | {field: value}, errors)
    assert f'id="{field}-fault"' in page
    assert 'aria-invalid="true"' in page


class Letter(BaseModel):
    text: str = "\nDear customer,\nthank you.\n"
    urgent: bool
    mode: Literal["fast", "slow"]


class Writing(JobProcessor[Letter]):
    async def process(self, job: Job[Letter]) -> None: ...


def test_lines_of_a_default_are_kept_as_browsers_send_them() -> None:
    page = form_fields(fields_of(Writing))
    assert ">\n\nDear customer,\nthank you.\n</textarea>" in page  # a browser drops the first newline
    sent = {
        "payload.text": "\r\nDear customer,\r\nthank you.\r\n",
        "payload.urgent": "true",
        "payload.mode": '"slow"',
    }
    payload, errors = read_form(Writing, sent)
    assert (payload["text"], errors) == (Letter.model_fields["text"].default, {})


def test_nothing_is_chosen_that_has_no_default() -> None:
    parser = _Tags()
    parser.feed(form_fields(fields_of(Writing)))
    options = [found["value"] for tag, found in parser.tags if tag == "option"]
    assert options == ["", "true", "false", "", '"fast"', '"slow"']
    _, errors = read_form(Writing, {"payload.text": "", "payload.urgent": "", "payload.mode": ""})
    assert errors == dict.fromkeys(("payload.urgent", "payload.mode"), "a value is needed")


@pytest.mark.parametrize("processor", [None, Anything])
def test_without_a_model_the_payload_is_json(processor: Any) -> None:
    [only] = fields_of(processor)
    assert (only.name, only.input) == (WHOLE, "json")
    assert read_form(processor, {WHOLE: '{"a": [1]}'}) == ({"a": [1]}, {})
    _, errors = read_form(processor, {WHOLE: "{"})
    assert list(errors) == [WHOLE]


def test_of_a_payload_type_that_cannot_be_used_it_is_told_when_it_is_sent() -> None:
    [only] = fields_of(Dangling)
    assert (only.name, only.input) == (WHOLE, "json")
    with pytest.raises(InvalidTarget, match=r"^the payload type of Dangling cannot be used: "):
        read_form(Dangling, {WHOLE: "{}"})


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_each_input_has_a_label_and_keeps_what_was_given() -> None:
    parser = _Tags()
    evil = '"><script>alert(1)</script>'
    parser.feed(form_fields(fields_of(Ordering), FILLED | {"payload.name": evil}, {WHOLE: evil}))
    tags = [tag for tag, _ in parser.tags]
    assert "script" not in tags
    ids = {found["id"] for tag, found in parser.tags if tag in {"input", "select", "textarea"}}
    assert ids == {found["for"] for tag, found in parser.tags if tag == "label"}
    [name] = [found for tag, found in parser.tags if found.get("name") == "payload.name"]
    assert name["value"] == evil
    selected = [found["value"] for tag, found in parser.tags if tag == "option" and "selected" in found]
    assert selected == ["true", '"large"']
