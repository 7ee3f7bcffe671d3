"""What the server sends reaches the inboxes whole and in order, however the network cuts it."""

import asyncio
import itertools
from typing import Any

import nats.aio.client
import nats.errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.subscription import Subscription

from jsworker.stream.nats_client import Client

INBOX = 7
LARGE = 70_000
"""Bytes of content: more than one read gives."""
STATUS = b"NATS/1.0 408 Request Timeout\r\n\r\n"
UNREADABLE = "a message was dropped, because its headers cannot be read"
HEADERS = b"NATS/1.0\r\nNats-Msg-Id: 1:1\r\n\r\n"


def delivery(number: int, content: bytes, *, inbox: int = INBOX) -> bytes:
    size = len(HEADERS) + len(content)
    reply = b"$JS.ACK.s.c.1.%d.%d.1.0" % (number, number)
    return b"HMSG jobs.kind %d %b %d %d\r\n%b%b\r\n" % (inbox, reply, len(HEADERS), size, HEADERS, content)


def plain(content: bytes) -> bytes:
    return b"MSG jobs.kind %d reply %d\r\n%b\r\n" % (INBOX, len(content), content)


def acknowledgement(content: bytes) -> bytes:
    return b"MSG _INBOX.1.5 %d %d\r\n%b\r\n" % (INBOX, len(content), content)


def status() -> bytes:
    return b"HMSG inbox.1 %d %d %d\r\n%b\r\n" % (INBOX, len(STATUS), len(STATUS), STATUS)


ACKNOWLEDGEMENTS = [b'{"stream":"JOBS","seq":1}', b"", b"\r\nMSG a 7 3\r\n"]
CONTENTS = [b"", b"one", b"two\r\nHMSG x 7 y 3 3\r\n", b"x" * LARGE, b"three", b"four"]
SENT = b"".join(
    [
        delivery(1, CONTENTS[0]),
        acknowledgement(ACKNOWLEDGEMENTS[0]),
        delivery(2, CONTENTS[1]),
        delivery(3, b"another's", inbox=8),
        status(),
        b"PING\r\n",
        acknowledgement(ACKNOWLEDGEMENTS[1]),
        delivery(4, CONTENTS[2]),
        delivery(5, CONTENTS[3]),
        plain(CONTENTS[4]),
        b"+OK\r\n",
        acknowledgement(ACKNOWLEDGEMENTS[2]),
        delivery(6, CONTENTS[5]),
    ]
)


class Inbox:
    """A client that is not connected, with one inbox."""

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, bytes]] = []
        self.acknowledgements: list[bytes] = []
        self.statuses: list[dict[str, str] | None] = []
        self.faults: list[Exception] = []
        self.client = Client(require_tls=False)
        self.client.inboxes[INBOX] = self.take
        self.client._process_ping = self.no_ping  # type: ignore[method-assign]

        async def note(error: Exception) -> None:
            self.faults.append(error)

        self.client._error_cb = note

    async def no_ping(self) -> None:
        """Answer none: it is not connected."""

    def take(self, subject: str, reply: bytes, data: bytes, headers: dict[str, str] | None) -> None:
        if reply:
            assert subject == "jobs.kind"
            self.taken.append((reply, data))
        elif headers is None:
            assert subject == "_INBOX.1.5"
            self.acknowledgements.append(data)
        else:
            self.statuses.append(headers)
        if data == b"raises":
            raise ValueError("a fault of one message")

    async def read(self, *chunks: bytes) -> None:
        for chunk in chunks:
            await self.client._ps.parse(chunk)


def check(inbox: Inbox) -> None:
    assert [data for _, data in inbox.taken] == CONTENTS
    replies = [b"$JS.ACK.s.c.1.%d.%d.1.0" % (number, number) for number in (1, 2, 4, 5, 6)]
    assert [reply for reply, _ in inbox.taken if reply != b"reply"] == replies
    assert inbox.acknowledgements == ACKNOWLEDGEMENTS
    assert [(headers or {}).get("Status") for headers in inbox.statuses] == ["408"]
    assert inbox.faults == []


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(1, len(SENT) - 1), max_size=6))
def test_wherever_it_is_cut(places: list[int]) -> None:
    edges = [0, *sorted(places), len(SENT)]
    chunks = [SENT[begin:end] for begin, end in itertools.pairwise(edges)]

    async def run() -> Inbox:
        inbox = Inbox()
        await inbox.read(*chunks)
        return inbox

    check(asyncio.run(run()))


SUBJECT = st.binary(min_size=1, max_size=12).filter(lambda subject: not set(subject) & set(b" \t\r\n"))
BLOCK = st.builds(
    bytes.__add__, st.sampled_from([b"", b"NATS/1.0", b"NATS/1.0 ", b"NATS/1.0 503\r\n"]), st.binary()
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(SUBJECT, SUBJECT | st.just(b""), BLOCK, st.binary()), max_size=6),
    st.sampled_from([INBOX, 8, 9]),
    st.integers(1, 200),
)
def test_whatever_subjects_and_headers_hold(
    messages: list[tuple[bytes, bytes, bytes, bytes]], number: int, size: int
) -> None:
    """Number 8 is a subscription of nats-py's own, number 9 none."""
    taken: list[tuple[str, bytes, bytes]] = []
    numbered = [(*rest, b"%d %b" % (index, content)) for index, (*rest, content) in enumerate(messages)]

    async def run() -> Inbox:
        inbox = Inbox()
        inbox.client.inboxes[INBOX] = lambda *message: taken.append(message[:3])
        inbox.client._subs[8] = Subscription(inbox.client, 8, "subject")
        sent = b""
        for subject, reply, block, content in numbered:
            words = [subject, b"%d" % number, *([reply] if reply else [])]
            sizes = [b"%d" % len(block)] if block else []
            line = b" ".join([b"HMSG" if block else b"MSG", *words, *sizes, b"%d" % len(block + content)])
            sent += b"%b\r\n%b%b\r\n" % (line, block, content) + acknowledgement(b"next")
        await inbox.read(*[sent[begin : begin + size] for begin in range(0, len(sent), size)])
        return inbox

    inbox = asyncio.run(run())
    assert {str(fault) for fault in inbox.faults if isinstance(fault, ValueError)} <= {UNREADABLE}
    assert len([message for message in taken if message == ("_INBOX.1.5", b"", b"next")]) == len(messages)
    readable = [
        (subject.decode("utf-8", "replace"), reply, content)
        for subject, reply, block, content in numbered
        if number == INBOX and (reply or not block)
    ]
    assert [message for message in taken if message in readable] == readable


@pytest.mark.parametrize("size", [1, 2, 7, 61, 4096, 32768])
async def test_however_little_comes_at_once(size: int) -> None:
    inbox = Inbox()
    await inbox.read(*[SENT[begin : begin + size] for begin in range(0, len(SENT), size)])
    check(inbox)


async def test_whole_messages_are_spared_the_slow_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    monkeypatch.delattr(type(inbox.client), "_process_msg")
    monkeypatch.delattr(nats.aio.client.Client, "_process_msg")
    await inbox.read(delivery(1, b"one") + acknowledgement(b"{}") + delivery(2, b"two"))
    assert [data for _, data in inbox.taken] == [b"one", b"two"]
    assert inbox.acknowledgements == [b"{}"]


async def test_a_fault_of_one_message_keeps_no_other_back() -> None:
    inbox = Inbox()
    await inbox.read(delivery(1, b"raises") + delivery(2, b"next"))
    assert [data for _, data in inbox.taken] == [b"raises", b"next"]
    assert [str(error) for error in inbox.faults] == ["a fault of one message"]


@pytest.mark.parametrize("noise", [b"HMSG jobs.kind x\r\n", b"HMSG a 7 b 5 x\r\n", b"nonsense\r\n"])
async def test_what_is_no_message_ends_the_connection(noise: bytes) -> None:
    inbox = Inbox()
    with pytest.raises(nats.errors.ProtocolError):
        await inbox.read(delivery(1, b"one") + noise)
    assert [data for _, data in inbox.taken] == [b"one"]


async def test_what_was_cut_off_is_forgotten_with_its_connection() -> None:
    inbox = Inbox()
    await inbox.read(delivery(1, b"one") + delivery(2, b"two")[:-5])
    reset: Any = inbox.client._ps.reset
    reset()
    await inbox.read(delivery(3, b"three"))
    assert [data for _, data in inbox.taken] == [b"one", b"three"]
