"""What a parent sends to a child that does not listen arrives whole, or not at all."""

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from jsworker.core.message_link import LONGEST_LINE, MessageLines, line_of
from jsworker.core.settings import Settings
from jsworker.supervisor.child_process import Child
from jsworker.supervisor.messages import FROM_PARENT, MOST_CULPRITS, FromParent, TakeBack
from jsworker.worker.supervision import DeadOwner
from tests.support.polling import eventually


@pytest.fixture
async def child(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Child, socket.socket]]:
    """A process that never reads what it is sent, and the socket from which it would."""
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    other, unused = socket.socketpair()
    with monkeypatch.context() as patch, unused:
        patch.setattr(socket, "socketpair", lambda: (mine, other))
        started = Child(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            Settings(database_url="postgresql://unused"),
            environment=dict(os.environ),
            connect_seconds=None,
            number=1,
            generation=1,
            on_message=lambda *_: None,
        )
    theirs.setblocking(False)
    with theirs:
        yield started, theirs
    started.send_signal(signal.SIGKILL)

    async def ended() -> None:
        assert started.exit_code is not None

    await eventually(ended)
    started.close()


async def test_no_line_is_cut_short(child: tuple[Child, socket.socket]) -> None:
    parents, childs = child
    dead = [
        DeadOwner(f"w{n}", "dead", 0.0, culprits=tuple(uuid4() for _ in range(MOST_CULPRITS)))
        for n in range(100)
    ]
    sent = [TakeBack(dead=each) for each in dead]
    for message in sent:
        parents.send(message)
    assert 0 < parents.link.unsent < LONGEST_LINE + len(line_of(sent[0]))
    lines = MessageLines(FROM_PARENT)
    heard: list[FromParent | None] = []

    async def all_heard() -> None:
        while True:
            try:
                heard.extend(lines.feed(childs.recv(65_536)))
            except BlockingIOError:
                break
        assert not parents.link.unsent

    await eventually(all_heard)
    assert heard
    assert heard == sent[: len(heard)]
    del heard[:]
    parents.send(sent[0])
    await eventually(all_heard)
    assert heard == [sent[0]]
