"""What a parent tells a child that does not listen arrives whole, or not at all."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import cast
from uuid import uuid4

import pytest

from jsworker.supervisor.child_messages import LONGEST_LINE, MOST_CULPRITS, Bury, Lines, Message, line_of
from jsworker.supervisor.child_process import Child, Watcher
from tests.support.polling import eventually


class _Nobody:
    def note_ready(self, _: Child) -> None:
        raise AssertionError

    def note_registered(self, *_: object) -> None:
        raise AssertionError

    def note_condemned(self, *_: object) -> None:
        raise AssertionError


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    """A process that never reads what it is told."""
    started = Child(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        environment=dict(os.environ),
        connect_seconds=None,
        number=1,
        generation=1,
        name=lambda pid: f"host-{pid}",
        concurrency=1,
        startup_timeout=600.0,
        watchdog_timeout=60.0,
        watcher=cast("Watcher", _Nobody()),
    )
    yield started
    started.send(signal.SIGKILL)

    async def ended() -> None:
        assert started.exit_code is not None

    await eventually(ended)
    started.close()


async def test_no_line_is_cut_short(child: Child) -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        asyncio.get_running_loop().remove_reader(child._socket)
        child._socket.close()
        mine.setblocking(False)
        theirs.setblocking(False)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        child._socket = mine
        told = [
            Bury(
                worker_id=f"w{n}",
                reason="dead",
                counted=True,
                culprits=[uuid4() for _ in range(MOST_CULPRITS)],
            )
            for n in range(100)
        ]
        for bury in told:
            child.bury(bury)
        assert len(child._unsent) < LONGEST_LINE + len(line_of(told[0]))
        lines = Lines()
        heard: list[Message | None] = []

        async def all_heard() -> None:
            while True:
                try:
                    heard.extend(lines.feed(theirs.recv(65_536)))
                except BlockingIOError:
                    break
            assert not child._unsent

        await eventually(all_heard)
        assert heard
        assert heard == told[: len(heard)]
        del heard[:]
        child.bury(told[0])
        await eventually(all_heard)
        assert heard == [told[0]]
