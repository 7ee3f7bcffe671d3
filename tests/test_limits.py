"""Limits, rates and keys as classes and producers write them: what is refused, in one line."""

from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from jsworker import JobProcessor, Limit, Rate, enqueue_statement
from jsworker.core.errors import InvalidName, InvalidPayload, Retry
from jsworker.core.job import Job


class Tenant(str, Enum):  # noqa: UP042 -- a StrEnum is formatted by its value
    ACME = "acme"


class Size(int, Enum):
    LARGE = 3


class Owned(BaseModel):
    tenant: Tenant = Tenant.ACME
    size: Size = Size.LARGE


class Order(BaseModel):
    tenant: str | None = None
    size: int = 1


def processor(**attributes: Any) -> type[JobProcessor[Order]]:
    class Sync(JobProcessor[Order]):
        async def process(self, job: Job[Order]) -> None: ...

    for name, value in attributes.items():
        setattr(Sync, name, value)
    return Sync


def key_of(kind: Any, payload: Any, **more: Any) -> Any:
    return enqueue_statement(kind, payload, **more).compile().params["limit_key"]


@pytest.mark.parametrize("number", [0, -1, 10**9])
def test_limits_beyond_all_reason(number: int) -> None:
    with pytest.raises(ValueError, match=rf"^limit={number} must be from 1 to 1000000$"):
        Limit(number)
    with pytest.raises(ValueError, match=rf"^rate={number} must be from 1 to 1000000$"):
        Rate(number)


@pytest.mark.parametrize("number", [1.5, "2", None, True])
def test_a_limit_is_a_whole_number(number: Any) -> None:
    with pytest.raises(TypeError, match="must be a whole number"):
        Limit(number)


@pytest.mark.parametrize("per", [0, -1.0, float("nan"), float("inf"), 1e9])
def test_spans_beyond_all_reason(per: float) -> None:
    with pytest.raises(ValueError, match="must be over 0 and at most 31622400 seconds"):
        Rate(1, per)


def test_a_billion_a_second() -> None:
    with pytest.raises(ValueError, match=r"rate 1000000 per 0\.001 s must be at most 1000000 a second"):
        Rate(1_000_000, 0.001)


@pytest.mark.parametrize("key", ["", 7, b"a"])
def test_a_key_is_a_field_or_a_callable(key: Any) -> None:
    with pytest.raises(TypeError, match="must be the name of a field of the payload, or a callable"):
        Limit(1, key=key)


@pytest.mark.parametrize("rule", [{"limit": Limit(1, key="tenant")}, {"rate": Rate(1, key="tenant")}])
def test_the_key_is_a_field_of_the_payload(rule: dict[str, Any]) -> None:
    assert key_of(processor(**rule), {"tenant": "a"}) == "a"
    assert key_of(processor(limit=Limit(1, key="size")), Order(size=7)) == "7"
    assert key_of(processor(limit=Limit(1, key=lambda order: order.size + 1)), {}) == "2"
    assert key_of(processor(**rule), {"tenant": "a"}, limit_key="mine") == "mine"
    assert key_of("sync", {"tenant": "a"}) is None
    assert key_of("sync", {}, limit_key="a") == "a"
    assert key_of(processor(limit=Limit(1)), {"tenant": "a"}) is None


def test_members_of_enums_are_keys_by_their_values() -> None:
    class OfEnums(JobProcessor[Owned]):
        limit = Limit(1, key="tenant")

        async def process(self, job: Job[Owned]) -> None: ...

    assert key_of(OfEnums, {"tenant": "acme"}) == "acme"
    assert key_of(processor(limit=Limit(1, key=lambda _: Tenant.ACME)), {}) == "acme"
    assert key_of(processor(limit=Limit(1, key=lambda _: Size.LARGE)), {}) == "3"
    OfEnums.limit = Limit(1, key="size")
    assert key_of(OfEnums, {}) == "3"
    assert type(key_of("sync", {}, limit_key=Tenant.ACME)) is str


def raising(_: Any) -> Any:
    raise KeyError("secret")


@pytest.mark.parametrize(
    ("key", "payload", "says"),
    [
        ("tenant", {}, "limit key of kind sync: field 'tenant' is null"),  # its default
        ("tenant", {"tenant": None}, "limit key of kind sync: field 'tenant' is null"),
        ("nothing", {}, "limit key of kind sync: the payload has no field 'nothing'"),
        (raising, {}, "limit key of kind sync: its callable raised KeyError"),
        (lambda _: None, {}, "limit key of kind sync: what its callable returned is NoneType"),
        (lambda _: 1.5, {}, "limit key of kind sync: what its callable returned is float"),
    ],
)
def test_payloads_without_a_key(key: Any, payload: Any, says: str) -> None:
    with pytest.raises(InvalidPayload, match=says) as refused:
        key_of(processor(limit=Limit(1, key=key)), payload)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "a" * 256, "a\0", "a\n"])
def test_keys_that_cannot_be(key: str) -> None:
    with pytest.raises(InvalidName, match="must be text of 1 to 255 printable characters"):
        key_of("sync", {}, limit_key=key)
    if "\0" not in key:  # no payload may hold that
        with pytest.raises(InvalidName, match="must be text of 1 to 255 printable characters"):
            key_of(processor(limit=Limit(1, key="tenant")), {"tenant": key})


def test_the_longest_key() -> None:
    assert key_of("sync", {}, limit_key="漢" * 255) == "漢" * 255


def test_a_key_for_a_limit_that_has_none() -> None:
    with pytest.raises(ValueError, match="limit_key='a': the limit of kind sync has no key"):
        key_of(processor(limit=Limit(1)), {}, limit_key="a")


def test_a_retry_pauses_a_key_for_a_while() -> None:
    assert Retry(30, pause="key").pause == "key"
    with pytest.raises(ValueError, match="pause='key' needs after"):
        Retry(pause="key")
    with pytest.raises(ValueError, match="pause='kind' must be 'key' or None"):
        Retry(30, pause="kind")  # type: ignore[arg-type]
