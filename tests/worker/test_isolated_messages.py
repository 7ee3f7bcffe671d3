"""What an owner and its isolated process send each other arrives as it was."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from jsworker.core.message_link import Message, MessageLines, line_of
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.enqueue import ChildJob, JobTerms, NewJob
from jsworker.worker.isolation.isolated_messages import (
    FROM_ISOLATED,
    FROM_OWNER,
    IdleTick,
    Introduction,
    JobsAdded,
    Order,
    Preparation,
    Prepared,
    Request,
    RunEnded,
    RunEvent,
    RunStacks,
    RunState,
    TeardownFailed,
)
from jsworker.worker.pipeline.in_flight import StopReason
from jsworker.worker.pipeline.outcomes import Completed, Failed, HandedBack, Interrupted, Lost, Outcome

CLAIMED = ClaimedJob(
    id=uuid4(),
    kind="kind",
    payload='{"deep": ' + "[" * 400 + "]" * 400 + "}",
    fencing_token=3,
    dispatch=2,
    attempt=1,
    max_attempts=5,
    cleared=True,
    clear_reason="taken back",
    deadline=datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    checkpoint=None,
    traceparent=None,
    tracestate=None,
    cancel_requested=False,
    stalls=1,
    max_stalls=2,
    waited=0.25,
    stored_bytes=10,
)

REQUESTS = [
    Request(what="stop", reason=StopReason.NO_PROGRESS),
    Request(what="drain"),
    Request(what="ask stacks"),
    Request(what="end"),
    Preparation(origin="m:C", middleware=("m:around",)),
    Order(claimed=CLAIMED, wanted=frozenset({"job.step"})),
]


def read_by_owner(message: Message) -> Message | None:
    [read] = MessageLines(FROM_ISOLATED).feed(line_of(message))
    return read


def read_by_isolated(message: Message) -> Message | None:
    [read] = MessageLines(FROM_OWNER).feed(line_of(message))
    return read


def test_an_introduction_arrives_with_its_settings_and_secrets() -> None:
    settings = Settings(
        database_url="postgresql://user@host/database",
        database_password="from-a-file",
        heartbeat_interval=1.5,
    )
    introduction = Introduction(
        path=["/a", "/not\udcffutf8"],
        worker_id="w",
        settings=settings,
        from_files=frozenset({"database_password"}),
        kinds=frozenset({"a", "b"}),
    )
    assert read_by_isolated(introduction) == introduction


@pytest.mark.parametrize("message", REQUESTS)
def test_requests_arrive(message: Message) -> None:
    assert read_by_isolated(message) == message
    assert read_by_owner(message) is None


@pytest.mark.parametrize(
    "message",
    [
        RunState(sign_at=1.5, quiet_seconds=0.0, quiet_until=2.5),
        RunStacks(stacks=[{"of": "task", "places": [], "waits_for": None}]),
        Prepared(error=None),
        Prepared(error="setup raised"),
        IdleTick(),
        RunEvent(name="job.progress", fields={"job_id": "j", "stage": None, "progress": 0.5}),
        JobsAdded(),
        TeardownFailed(kind="k", reason="raised"),
    ],
)
def test_reports_arrive(message: Message) -> None:
    assert read_by_owner(message) == message
    assert read_by_isolated(message) is None


@pytest.mark.parametrize(
    "outcome",
    [
        Completed(None),
        Completed('{"a": "\udc80"}'),
        Failed("error", "result", 1.5),
        Failed("error", None, 0.0, stalled=True),
        HandedBack("draining"),
        Interrupted("error", "reason", 2.0),
        Lost(),
    ],
)
def test_outcomes_arrive(outcome: Outcome) -> None:
    children = [
        ChildJob(
            "child", NewJob(uuid4(), '{"a": "é"}', "key", 1.5, 2, 3, "span", "state", "tenant", 0, terms)
        )
        for terms in (None, JobTerms(datetime.now(UTC), 5.0, "debounce", None, 1.0, 2.0))
    ]
    sent = RunEnded(outcome=outcome, completed=True, child_jobs=children, lacks="files")
    assert read_by_owner(sent) == sent


@pytest.mark.parametrize(
    "nonsense",
    [
        b'{"what":"ended","outcome":{"sudden":true},"completed":true,"child_jobs":[]}',
        b'{"what":"ended","outcome":{"error":7},"completed":true,"child_jobs":[]}',
        b'{"what":"ended","outcome":{"result":null,"reason":"two at once"},"completed":true,"child_jobs":[]}',
        b'{"what":"ended","outcome":[],"completed":true,"child_jobs":[]}',
        b'{"what":"state","sign_at":NaN,"quiet_seconds":0,"quiet_until":0}',
    ],
)
def test_nonsense_is_no_outcome(nonsense: bytes) -> None:
    assert list(MessageLines(FROM_ISOLATED).feed(nonsense + b"\n")) == [None]
