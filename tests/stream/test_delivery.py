"""What a consumer delivered, read from the reply subject and the content."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from jsworker.stream.message import Delivery, Undecodable, WireMessage, encode, read

JOB = UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")
DATA = encode(WireMessage(JOB, "resize", 3))
PLAIN = "$JS.ACK.JOBS.resize.2.17.99.1795181039279298385.5"
WITH_DOMAIN = "$JS.ACK.hub.ACCOUNTHASH.JOBS.resize.2.17.99.1795181039279298385.5.random"


def arrived(reply: str, data: bytes = DATA) -> Delivery | Undecodable | None:
    return read("jobs.resize", reply.encode(), data, kind="resize", send=lambda *_: None)


@pytest.mark.parametrize("reply", [PLAIN, WITH_DOMAIN])
def test_the_reply_subject_tells_number_and_time(reply: str) -> None:
    delivery = arrived(reply)
    assert isinstance(delivery, Delivery)
    assert (delivery.stream_seq, delivery.job_id, delivery.dispatch) == (17, JOB, 3)
    assert delivery.stored_at == datetime(2026, 11, 20, 13, 23, 59, 279298, tzinfo=UTC)


@pytest.mark.parametrize("reply", [PLAIN, WITH_DOMAIN])
def test_what_cannot_be_read_keeps_number_and_time(reply: str) -> None:
    unread = arrived(reply, b"[")
    assert isinstance(unread, Undecodable)
    assert (unread.stream_seq, unread.data, unread.reason) == (17, b"[", "not JSON")
    assert repr(unread) == "<Undecodable 17 on jobs.resize: not JSON>"


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "x",
        "somewhere.else",
        "$JS.ACK.",
        "$JS.ACK.JOBS.resize.2.x.99.1795181039279298385.5",
        "$JS.ACK.JOBS.resize.2.17.99.x.5",
        "$JS.ACK." + "." * 20,
        "a.b.JOBS.resize.2.17.99.1795181039279298385.5",
        "$JS.ACK." + "9" * 5000,
        "$JS.ACK.JOBS.resize.2.17.99.9223372036854775808.5",
        "$JS.ACK.JOBS.resize.2.9223372036854775808.99.1795181039279298385.5",
        "$JS.ACK.JOBS.resize.2.17.99.-1.5",
    ],
)
def test_a_reply_that_is_not_jetstreams_is_no_delivery(reply: str) -> None:
    assert arrived(reply) is None
