"""The message on the wire: exactly these fields, and nothing else is believed."""

import json
from typing import Any
from uuid import UUID

import pytest

from jsworker.stream.message import (
    LIMIT_BYTES,
    MalformedMessage,
    WireMessage,
    decode,
    encode,
    header_block,
    message_id,
    subject_of,
)

JOB = UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")
FIELDS: dict[str, Any] = {
    "v": 1,
    "job_id": str(JOB),
    "kind": "resize",
    "dispatch": 3,
    "cleared": True,
    "clear_reason": "owner is gone",
}


def wire(**changes: Any) -> bytes:
    return json.dumps(FIELDS | changes).encode()


def without(field: str) -> bytes:
    return json.dumps({name: value for name, value in FIELDS.items() if name != field}).encode()


def with_raw(field: str, raw: bytes) -> bytes:
    return wire(**{field: "@"}).replace(b'"@"', raw)


def test_a_message_travels_with_exactly_the_fields_of_the_protocol() -> None:
    message = WireMessage(JOB, "resize", 3, cleared=True, clear_reason="owner is gone")
    assert json.loads(encode(message)) == FIELDS
    assert decode(encode(message), subject_kind="resize") == message


def test_a_message_that_was_never_cleared_says_so() -> None:
    message = WireMessage(JOB, "resize", 1)
    fields = json.loads(encode(message))
    assert (fields["cleared"], fields["clear_reason"]) == (False, None)
    assert decode(encode(message), subject_kind="resize") == message


def test_a_new_dispatch_is_a_new_message_to_the_duplicate_window() -> None:
    assert message_id(JOB, 1) == f"{JOB}:1"
    assert message_id(JOB, 2) != message_id(JOB, 1)


def test_the_subject_is_prefix_and_kind() -> None:
    assert subject_of("jobs", "resize") == "jobs.resize"


def test_unknown_fields_are_ignored() -> None:
    assert decode(wire(colour="red", nested={"a": [1]}), subject_kind="resize").job_id == JOB


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"{", "not JSON", id="cut"),
        pytest.param(b"\xff\xfe\x00", "not JSON", id="no text"),
        pytest.param(with_raw("kind", b'"\xff"'), "not JSON", id="invalid UTF-8"),
        pytest.param(with_raw("kind", b'"\\ud800"'), "not JSON", id="lone surrogate"),
        pytest.param(b"[" * 60_000, "not JSON", id="deep"),
        pytest.param(with_raw("extra", b"[" * 60_000), "not JSON", id="deep in an unknown field"),
        pytest.param(b"[" * 100_000, "too large", id="deep and large"),
        pytest.param(b"null", "not a JSON object", id="null"),
        pytest.param(b"[]", "not a JSON object", id="array"),
        pytest.param(b"NaN", "not a JSON object", id="NaN"),
        pytest.param(wire(x="y" * LIMIT_BYTES), "too large", id="64 KiB and more"),
        pytest.param(wire(v=2), "wrong version", id="version 2"),
        pytest.param(wire(v=True), "wrong version", id="bool as version"),
        pytest.param(wire(v=1.0), "wrong version", id="float as version"),
        pytest.param(wire(v="1"), "wrong version", id="text as version"),
        pytest.param(b'{"v":2}', "wrong version", id="another version with other fields"),
        pytest.param(b"{}", "wrong version", id="no version"),
        pytest.param(wire(job_id="5"), "job_id must be a UUID", id="job_id no UUID"),
        pytest.param(wire(job_id=5), "job_id must be a UUID", id="job_id a number"),
        pytest.param(without("job_id"), "job_id must be a UUID", id="no job_id"),
        pytest.param(wire(kind=None), "kind must be a text", id="no kind"),
        pytest.param(wire(kind="crop"), "kind is not resize", id="forged kind"),
        pytest.param(wire(kind="resize "), "kind is not resize", id="kind with a space"),
        pytest.param(wire(dispatch=True), "dispatch must be an integer", id="bool as dispatch"),
        pytest.param(wire(dispatch=0), "dispatch must be an integer from 1", id="dispatch 0"),
        pytest.param(wire(dispatch=-1), "dispatch must be an integer from 1", id="dispatch negative"),
        pytest.param(wire(dispatch=1.0), "dispatch must be an integer", id="dispatch a float"),
        pytest.param(wire(dispatch="3"), "dispatch must be an integer", id="dispatch a text"),
        pytest.param(wire(dispatch=2**63), "dispatch must be an integer", id="dispatch beyond the column"),
        pytest.param(with_raw("dispatch", b"NaN"), "dispatch must be an integer", id="dispatch NaN"),
        pytest.param(
            with_raw("dispatch", b"Infinity"), "dispatch must be an integer", id="dispatch Infinity"
        ),
        pytest.param(with_raw("dispatch", b"9" * 5_000), "not JSON", id="5000 digits"),
        pytest.param(wire(cleared=0), "cleared must be true or false", id="number as cleared"),
        pytest.param(wire(clear_reason=["x"]), "clear_reason must be a text or null", id="list as reason"),
    ],
)
def test_what_breaks_a_rule_is_named_by_the_rule(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(data, subject_kind="resize")
    assert str(caught.value).startswith(reason)


def test_a_key_given_twice_does_not_crash() -> None:
    twice = wire()[:-1] + b',"dispatch":4}'
    assert decode(twice, subject_kind="resize").dispatch in {3, 4}


def test_NaN_in_a_field_that_nobody_reads_does_not_crash() -> None:  # noqa: N802 -- NaN is its name
    assert decode(with_raw("extra", b"NaN"), subject_kind="resize").job_id == JOB


@pytest.mark.parametrize("field", ["job_id", "kind", "clear_reason", "v"])
def test_the_reason_never_shows_the_content(field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(wire(**{field: ["hunter2"]}), subject_kind="resize")
    assert "hunter2" not in str(caught.value)


def test_a_long_reason_is_cut_so_that_the_message_fits() -> None:
    data = encode(WireMessage(JOB, "resize", 1, cleared=True, clear_reason="\x01" * 100_000))
    assert len(data) < LIMIT_BYTES
    assert decode(data, subject_kind="resize").clear_reason == "\x01" * 1000


def test_headers_are_one_line_each() -> None:
    block = header_block(WireMessage(JOB, "resize", 3), {"traceparent": "00-ab-cd-01"})
    assert block == f"NATS/1.0\r\nNats-Msg-Id: {JOB}:3\r\ntraceparent: 00-ab-cd-01\r\n\r\n".encode()


@pytest.mark.parametrize(
    "extra",
    [{"a": "b\r\nPUB jobs.x 0"}, {"a\r\nb": "c"}, {"a b": "c"}, {"a:b": "c"}, {"": "c"}, {"a": "b\nc"}],
)
def test_a_header_cannot_smuggle_in_a_command(extra: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one line"):
        header_block(WireMessage(JOB, "resize", 3), extra)
