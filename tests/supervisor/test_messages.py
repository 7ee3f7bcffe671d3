"""Lines between parent and child, however they arrive."""

import socket
from uuid import uuid4

import pytest
from pydantic import TypeAdapter

from jsworker.core.message_link import LONGEST_LINE, SPARING_RATE, Message, MessageLines, MessageLink, line_of
from jsworker.supervisor.messages import (
    FROM_CHILD,
    FROM_PARENT,
    FromChild,
    FromParent,
    KillRequest,
    Registered,
    Report,
    StopWorker,
    TakeBack,
    Tick,
    Wake,
)
from jsworker.telemetry.worker_status import Readiness
from jsworker.worker.supervision import DeadOwner
from tests.support.polling import eventually

WELL = Readiness(postgresql=True, nats=True, migration="0001", pulling=True, draining=False, problems=["a"])
TO_PARENT: list[FromChild] = [
    Tick(),
    Report(readiness=WELL, figures="figures"),
    Report(readiness=None, figures=None),
    Registered(worker_id="host-1-0123abcd"),
    Tick(quiet_until=12.5),
    KillRequest(culprits=[(uuid4(), 3)], reason="a thread that never ends\n"),
]
TO_CHILD: list[FromParent] = [
    Wake(),
    TakeBack(dead=DeadOwner("host-1-0123abcd", "dead", 12.5, counted=False, culprits=(uuid4(),))),
    StopWorker(force=True),
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(("messages", "adapter"), [(TO_PARENT, FROM_CHILD), (TO_CHILD, FROM_PARENT)])
def test_messages_arrive_however_they_are_cut(
    size: int, messages: list[Message], adapter: TypeAdapter[Message]
) -> None:
    stream = b"".join(line_of(message) for message in messages)
    lines = MessageLines(adapter)
    heard = [
        message
        for start in range(0, len(stream), size)
        for message in lines.feed(stream[start : start + size])
    ]
    assert heard == messages


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"what":"dance"}',
        b'{"what":"tick","quiet_until":Infinity}',
        b'{"what":"kill","culprits":"all","reason":""}',
        b'{"what":"stop","force":true}',
        b'{"what":"report","readiness":"nonsense","figures":null}',
        b"[" * 30_000,
        b"x" * (LONGEST_LINE + 1),
    ],
)
def test_nonsense_is_passed_over(nonsense: bytes) -> None:
    assert list(MessageLines(FROM_CHILD).feed(nonsense + b"\n" + line_of(Tick()))) == [None, Tick()]


def test_a_line_that_never_ends_is_not_kept() -> None:
    lines = MessageLines(FROM_CHILD)
    for _ in range(100):
        assert list(lines.feed(b"x" * LONGEST_LINE)) == []
        assert len(lines._partial) <= LONGEST_LINE
    assert list(lines.feed(b"\n" + line_of(Tick()))) == [None, Tick()]


async def test_nonsense_costs_a_moment_and_not_what_is_sent_later() -> None:
    ours, theirs = socket.socketpair()
    heard: list[FromChild] = []
    link = MessageLink(ours, FROM_CHILD, on_message=heard.append, rate=SPARING_RATE)
    link.open()
    with theirs:
        theirs.sendall(b"{\n" * 30_000)
        link.hear()
        theirs.sendall(line_of(Tick()))

        async def tick_is_heard() -> None:
            assert heard == [Tick()]

        await eventually(tick_is_heard)
    link.close()
