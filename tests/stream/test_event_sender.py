"""Events of jobs for plain subscribers, on a real server: what they hold, and that they hold nobody up."""

import json
import signal
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.core.events import EVENT_NAMES
from jsworker.core.priorities import PRIORITIES
from jsworker.stream import event_sender
from jsworker.stream.event_sender import WORDS, EventSender
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually

FACTS = {"job_id": "an id", "kind": "resize", "attempt": 2, "fencing_token": 3}
CANARY = "c4n4ry"
FORBIDDEN = """
authorization { users: [
  { user: me, password: secret, permissions: { publish: { deny: "jobs.events.>" } } }
] }
"""


async def heard(plain: NatsClient, subject: str = "jobs.events.>") -> list[Msg]:
    """Return what is heard from now on."""
    messages: list[Msg] = []

    async def hear(message: Msg) -> None:
        messages.append(message)

    await plain.subscribe(subject, cb=hear)
    await plain.flush()
    return messages


async def hears(messages: list[Msg], *subjects: str) -> list[dict[str, Any]]:
    async def came() -> list[dict[str, Any]]:
        assert [message.subject for message in messages] == list(subjects)
        return [json.loads(message.data) for message in messages]

    return await eventually(came)


async def test_each_event_has_a_subject_and_holds_no_word_of_a_job(
    stream: TestStream, plain: NatsClient
) -> None:
    messages = await heard(plain)
    sender = EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    words = {"error": CANARY, "reason": CANARY, "stage": CANARY, "result": CANARY, "payload": CANARY}
    for name in sorted(EVENT_NAMES):
        stream.events.emit(name, ValueError(CANARY), **FACTS, **words, seconds=1.23456, progress=0.5)
    expected = [f"jobs.events.resize.{WORDS[name]}" for name in sorted(WORDS)]
    found = await hears(messages, *expected)
    for each, name in zip(found, sorted(WORDS), strict=True):
        at = each.pop("at")
        assert at.endswith("+00:00")
        assert each == {
            "v": 1,
            "event": WORDS[name],
            "worker_id": "worker-1",
            **FACTS,
            "seconds": 1.235,
            "progress": 0.5,
        }
    assert CANARY not in str([message.data for message in messages])
    assert sender.dropped == 0


async def test_an_error_of_a_hook_is_no_end_of_a_run(stream: TestStream, plain: NatsClient) -> None:
    messages = await heard(plain)
    EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    stream.events.emit("job.error", **FACTS, error="in a hook")
    stream.events.emit("job.completed", **FACTS)
    await hears(messages, "jobs.events.resize.completed")


async def test_the_stream_takes_none_of_them(
    open_stream: OpenStream, stream: TestStream, plain: NatsClient
) -> None:
    kinds = ["events", *PRIORITIES, "resize"]
    await stream.ensure(kinds, dict.fromkeys(kinds, 600.0))
    EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    messages = await heard(plain)
    for kind in kinds:
        for name in WORDS:
            stream.events.emit(name, **(FACTS | {"kind": kind}), seconds=1.0)
    expected = [f"jobs.events.{kind}.{word}" for kind in kinds for word in WORDS.values()]
    await hears(messages, *expected)
    assert (await stream.state()).messages == 0
    assert set(WORDS.values()).isdisjoint(PRIORITIES)


async def test_without_a_connection_they_are_dropped_and_counted(
    server: NatsServer, stream: TestStream, plain: NatsClient
) -> None:
    sender = EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    await server.stop(signal.SIGKILL)

    async def is_lost() -> None:
        assert not stream.connected

    await eventually(is_lost)
    for _ in range(3):
        stream.events.emit("job.completed", **FACTS)
    assert sender.dropped == 3
    await server.start()

    async def sends_again() -> None:
        before = sender.dropped
        stream.events.emit("job.completed", **FACTS)
        assert sender.dropped == before

    await eventually(sends_again)
    assert not plain.is_closed


async def test_what_a_slow_server_does_not_read_is_dropped(
    stream: TestStream, plain: NatsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = await heard(plain)
    sender = EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    monkeypatch.setattr(event_sender, "_MOST_PENDING_BYTES", 1000)
    for _ in range(100):  # none is sent before the next await
        stream.events.emit("job.completed", **FACTS)
    assert 90 < sender.dropped < 100
    await hears(messages, *["jobs.events.resize.completed"] * (100 - sender.dropped))


async def test_who_may_not_publish_them_tries_once(
    start_server: StartServer, open_stream: OpenStream
) -> None:
    server = await start_server(FORBIDDEN)
    stream = await open_stream(url=server.url, nats_user="me", nats_password="secret")
    sender = EventSender(stream.connection, stream.events, prefix="jobs", worker_id="worker-1")
    told: list[str] = []
    stream.events.on("worker.degraded", lambda event: told.append(str(event.fields["reason"])))
    stream.events.emit("job.completed", **FACTS)

    async def is_denied() -> None:
        assert told

    await eventually(is_denied)
    stream.events.emit("job.failed", **FACTS)
    await stream.flush()
    assert sender.dropped == 1
    [reason] = told
    assert 'permissions violation for publish to "jobs.events.resize.completed"' in reason
