"""Lines between parent and child, however they arrive."""

from uuid import uuid4

import pytest

from jsworker.supervisor.child_messages import (
    LONGEST_LINE,
    Condemn,
    Lines,
    Message,
    QuietUntil,
    Registered,
    Stop,
    Tick,
    Wake,
    line_of,
)

MESSAGES: list[Message] = [
    Tick(),
    Registered(worker_id="host-1-0123abcd"),
    QuietUntil(boottime=12.5),
    Condemn(culprits=[(uuid4(), 3)], reason="a thread that never ends\n"),
    Wake(),
    Stop(force=True),
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_arrive_however_they_are_cut(size: int) -> None:
    stream = b"".join(line_of(message) for message in MESSAGES)
    lines = Lines()
    heard = [
        message
        for start in range(0, len(stream), size)
        for message in lines.feed(stream[start : start + size])
    ]
    assert heard == MESSAGES


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"what":"dance"}',
        b'{"what":"quiet","boottime":Infinity}',
        b'{"what":"condemn","culprits":"all","reason":""}',
        b"[" * 30_000,
        b"x" * (LONGEST_LINE + 1),
    ],
)
def test_nonsense_is_passed_over(nonsense: bytes) -> None:
    assert list(Lines().feed(nonsense + b"\n" + line_of(Tick()))) == [None, Tick()]


def test_a_line_that_never_ends_is_not_kept() -> None:
    lines = Lines()
    for _ in range(100):
        assert list(lines.feed(b"x" * LONGEST_LINE)) == []
        assert len(lines._begun) <= LONGEST_LINE
    assert list(lines.feed(b"\n" + line_of(Tick()))) == [None, Tick()]
