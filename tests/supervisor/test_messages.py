"""Lines between parent and child, however they arrive."""

import random
import socket
import string
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter

from jsworker.core.events import EVENT_NAMES, Events
from jsworker.core.message_link import LONGEST_LINE, SPARING_RATE, Message, MessageLines, MessageLink, line_of
from jsworker.ownership.queries.job_report import LimitUse, Waiting
from jsworker.ownership.schema import HELD_BY
from jsworker.supervisor.messages import (
    FROM_CHILD,
    FROM_PARENT,
    LONGEST_FIGURES,
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
from jsworker.telemetry.figures import packed, unpacked
from jsworker.telemetry.metrics import Metrics
from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS, Fleet, KindQueue, Readiness
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


CAUSES = ("stale", "crashed", "dead", "crashed in quarantine", "crashed in isolation")


class Busy:
    """A worker whose kinds have all figures that kinds can have, with many digits."""

    def __init__(self, kinds: list[str], chance: random.Random) -> None:
        self.events = Events()
        self._kinds = kinds
        self._chance = chance

    def status(self) -> None:
        return None

    def fleet(self) -> Fleet:
        return Fleet({kind: self._queue() for kind in (*self._kinds, OTHER_KINDS)}, 3, 1.5, 0)

    def _queue(self) -> KindQueue:
        waiting = Waiting(
            jobs={status: self._number() for status in ("scheduled", "queued", "processing")},
            oldest_seconds=self._seconds(),
            held={why: self._number() for why in HELD_BY},
            held_oldest_seconds={why: self._seconds() for why in HELD_BY},
            lanes={lane: (self._number(), self._seconds()) for lane in ("high", "low")},
            limit=LimitUse(self._number(), self._number(), self._number()),
            schedule_lag_seconds=self._seconds(),
        )
        return KindQueue(waiting, self._number(), self._number())

    def _number(self) -> int:
        return self._chance.randrange(10**6)

    def _seconds(self) -> float:
        return self._chance.random() * 10**6

    def work(self) -> None:
        """Emit every event that is counted by kind, more than once."""
        self.events.emit("worker.started", kinds=self._kinds)
        counts = {"jobs": 7, "instants": 5, "messages": 3, "late_write": True, "outcome": "completed"}
        for kind in self._kinds:
            for name in EVENT_NAMES:
                if name.startswith(("job.", "schedule.")) or name == "jobs.expired":
                    for cause in CAUSES:
                        seconds = self._chance.expovariate(0.3) ** 3
                        durations = {"seconds": seconds, "waited": seconds, "seconds_late": seconds}
                        reasons = {"cause": cause, "status": cause, "counted": seconds < 3.0}
                        self.events.emit(name, kind=kind, **counts, **durations, **reasons)


def test_the_figures_of_as_many_kinds_as_have_their_own_fit_into_a_report() -> None:
    chance = random.Random(1)  # noqa: S311 -- the same each time
    letters = string.ascii_lowercase + string.digits + "-_"
    busy = Busy(["a" + "".join(chance.choices(letters, k=63)) for _ in range(MOST_KINDS)], chance)
    registry = CollectorRegistry()
    Metrics(registry).watch(busy)
    busy.work()
    figures = packed(registry)
    assert len(figures) <= LONGEST_FIGURES * 0.9
    assert unpacked(figures)
    report = Report(readiness=WELL, figures=figures)
    assert list(MessageLines(FROM_CHILD, longest=LONGEST_LINE + LONGEST_FIGURES).feed(line_of(report))) == [
        report
    ]


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
