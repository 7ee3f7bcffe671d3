"""NATS's shipped users: each can do its own, and the server refuses the rest."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import nats.errors
import pytest
from nats.aio.client import Client as NatsClient

from jsworker import JobClient
from jsworker.core.errors import SettingsError, StreamRefused
from jsworker.core.settings import Settings
from jsworker.stream.event_sender import EventSender
from jsworker.stream.liveness import Answer, Reply, Witness, ask_stacks
from jsworker.stream.message import WireMessage
from jsworker.stream.result_hints import HintReceiver, HintSender
from tests.security.guarded import nats_user
from tests.stream.desk import Desk, until
from tests.stream.nats_server import HOST, NatsServer
from tests.stream.streams import TestStream, settings_for
from tests.support.polling import eventually

WAITS = {"echo": 600.0}

MAY_NOT = {
    "worker": [
        "$JS.API.STREAM.PURGE.OTHERS",
        "$JS.API.STREAM.DELETE.JOBS",
        "$JS.API.STREAM.CREATE.JOBS",
        "$JS.API.STREAM.UPDATE.JOBS",
        "$JS.API.STREAM.MSG.DELETE.JOBS",
        "$JS.API.CONSUMER.CREATE.JOBS.thief.jobs.echo",
        "$JS.API.CONSUMER.DELETE.JOBS.echo",
        "$JS.API.CONSUMER.MSG.NEXT.OTHERS.echo",
        "$JS.API.STREAM.MSG.GET.OTHERS",
        "$JS.ACK.OTHERS.echo.1.1.1.1.1",
        "$JS.API.ACCOUNT.PURGE.JSWORKER",
        "orders.new",
        "jobs.echo.deeper",
        "_INBOX_PRODUCER.answer",
        "_INBOX_OPERATOR.answer",
        "_INBOX.answer",
    ],
    "producer": [
        "$JS.API.CONSUMER.MSG.NEXT.JOBS.echo",
        "$JS.API.CONSUMER.INFO.JOBS.echo",
        "$JS.API.STREAM.MSG.GET.JOBS",
        "$JS.API.STREAM.PURGE.JOBS",
        "$JS.API.STREAM.CREATE.JOBS",
        "$JS.ACK.JOBS.echo.1.1.1.1.1",
        "jobs.events.echo.completed",
        "jsworker.worker.any",
        "jsworker.ended.0123456789abcdef",
        "_INBOX_WORKER.answer",
        "orders.new",
    ],
    "operator": [
        "$JS.API.STREAM.PURGE.JOBS",
        "$JS.API.STREAM.DELETE.JOBS",
        "$JS.API.STREAM.CREATE.OTHERS",
        "$JS.API.CONSUMER.DELETE.JOBS.echo",
        "$JS.API.CONSUMER.MSG.NEXT.JOBS.echo",
        "_INBOX_WORKER.answer",
        "orders.new",
    ],
}

MAY_NOT_HEAR = {
    "worker": ["jobs.*", "jobs.echo", ">", "_INBOX.>", "_INBOX_PRODUCER.>", "$JS.API.>", "$SYS.>"],
    "producer": [
        "jobs.*",
        ">",
        "_INBOX.>",
        "_INBOX_WORKER.>",
        "jsworker.worker.any",
        "jsworker.awaited.*",
        "jobs.events.>",  # includes jobs.events.high, on which producers publish
        "$JS.EVENT.>",
    ],
    "operator": ["jobs.*", "jobs.events.>", ">", "_INBOX.>", "_INBOX_WORKER.>", "jsworker.worker.any"],
}


def cases(what: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(role, subject) for role, subjects in what.items() for subject in subjects]


@asynccontextmanager
async def connected(server: NatsServer, login: dict[str, str]) -> AsyncIterator[tuple[NatsClient, list[str]]]:
    """Give a connection of nats-py's own, and what the server complains of."""
    complaints: list[str] = []

    async def hear(error: Exception) -> None:
        complaints.append(str(error))

    client = await nats.connect(
        server.url, user=login["nats_user"], password=login["nats_password"], error_cb=hear
    )
    try:
        yield client, complaints
    finally:
        await client.close()


async def refusal(client: NatsClient, complaints: list[str]) -> str:
    await client.flush()

    async def complained() -> str:
        assert complaints
        return complaints[0].lower()

    return await eventually(complained)


@pytest.mark.parametrize(("role", "subject"), cases(MAY_NOT))
async def test_a_user_is_refused_to_publish_elsewhere(
    guarded_nats: NatsServer, role: str, subject: str
) -> None:
    async with connected(guarded_nats, nats_user(role)) as (client, complaints):
        await client.publish(subject, b"")
        assert f'permissions violation for publish to "{subject.lower()}"' in await refusal(
            client, complaints
        )


@pytest.mark.parametrize(("role", "subject"), cases(MAY_NOT_HEAR))
async def test_a_user_is_refused_to_listen_elsewhere(
    guarded_nats: NatsServer, role: str, subject: str
) -> None:
    async with connected(guarded_nats, nats_user(role)) as (client, complaints):
        await client.subscribe(subject)
        assert f'permissions violation for subscription to "{subject.lower()}"' in await refusal(
            client, complaints
        )


async def test_nobody_gets_in_without_a_login(guarded_nats: NatsServer) -> None:
    stream = TestStream(settings_for(guarded_nats.url), installation_id=None)
    with pytest.raises(StreamRefused, match="refused the login"):
        await stream.connect()


OpenAs = Callable[..., Any]


@pytest.fixture
async def open_as(guarded_nats: NatsServer) -> AsyncIterator[OpenAs]:
    """Return connected streams of a role; keyword arguments are settings."""
    opened: list[TestStream] = []

    async def open_(role: str, **changes: Any) -> TestStream:
        settings = settings_for(guarded_nats.url, **(nats_user(role) | changes))
        stream = TestStream(settings, installation_id=None)
        opened.append(stream)
        await stream.connect()
        return stream

    yield open_
    for stream in opened:
        await stream.close()


async def test_the_operator_makes_what_workers_and_producers_then_find(open_as: OpenAs) -> None:
    operator = await open_as("operator")
    await operator.ensure(["echo"], WAITS)
    await operator.ensure(["echo"], {"echo": 700.0})  # and changes it
    worker = await open_as("worker")
    await worker.ensure(["echo"], WAITS)  # a longer ack_wait than its own does no harm
    producer = await open_as("producer")
    await producer.ensure([], {})
    for stream in (worker, producer):
        assert stream.told_of("stream.changed") == []
        assert (await stream.state()).messages == 0


@pytest.mark.parametrize("role", ["worker", "producer"])
async def test_who_finds_no_stream_and_may_not_make_one_says_so(open_as: OpenAs, role: str) -> None:
    stream = await open_as(role)
    with pytest.raises(StreamRefused) as refused:
        await stream.ensure(["echo"] if role == "worker" else [], WAITS)
    assert "stream JOBS cannot be made; the server says: permissions violation" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("consumer", "subject", "command"),
    [
        ("resize", "jobs.resize", "jsworker stream ensure resize"),
        ("resize=high", "jobs.resize.high", "jsworker stream ensure --lanes resize"),
    ],
)
async def test_a_worker_that_finds_no_consumer_and_may_not_make_one_says_who_may(
    open_as: OpenAs, consumer: str, subject: str, command: str
) -> None:
    await (await open_as("operator")).ensure(["echo"], WAITS)
    worker = await open_as("worker")
    with pytest.raises(StreamRefused) as refused:
        await worker.ensure(["echo", consumer], WAITS)
    error = str(refused.value)
    assert f"consumer {consumer} of stream JOBS cannot be made for {subject}" in error
    assert error.endswith(f"; run `{command}` with a login that may make it")


async def test_a_worker_learns_of_consumers_that_are_none_of_its_own(open_as: OpenAs) -> None:
    await (await open_as("operator")).ensure(["echo", "of-other-workers"], WAITS)
    worker = await open_as("worker")
    await worker.publish_raw("jobs.ghost", b"")
    assert await worker.unconsumed(["echo"]) == {"ghost": 1}
    assert worker.told == []


async def test_the_wrong_inbox_is_named_at_once(guarded_nats: NatsServer) -> None:
    login = nats_user("worker") | {"nats_inbox_prefix": "_INBOX"}
    stream = TestStream(settings_for(guarded_nats.url, **login), installation_id=None)
    began = asyncio.get_running_loop().time()
    with pytest.raises(StreamRefused) as refused:
        await stream.connect(timeout=60.0)
    assert 'permissions violation for subscription to "_inbox.' in str(refused.value)
    assert str(refused.value).endswith("(see JSWORKER_NATS_INBOX_PREFIX)")
    assert asyncio.get_running_loop().time() - began < 30.0


@pytest.mark.parametrize("prefix", ["_INBOX.>", "a b", "", "a..b", "*", "$JS", "a" * 101, "a\r\nPUB x 0"])
def test_an_inbox_prefix_is_words_of_a_subject(prefix: str) -> None:
    with pytest.raises(SettingsError, match=r"^JSWORKER_NATS_INBOX_PREFIX=.* must be dot-separated words"):
        settings_for("nats://host:4222", nats_inbox_prefix=prefix)


async def test_workers_hear_of_each_other(open_as: OpenAs) -> None:
    one, other = await open_as("worker"), await open_as("worker")
    assert await Witness(one.connection, "pod-0.example-17-a1").prove(30.0)
    asker = Witness(other.connection, "pod-1-9-ff")
    assert await asker.ask("pod-0.example-17-a1", 30.0) is Answer.ALIVE
    assert await asker.ask("pod-7-1-00", 30.0) is Answer.NO_RESPONDERS
    assert one.told == other.told == []


async def test_workers_tell_their_stacks_to_workers_alone(open_as: OpenAs, guarded_nats: NatsServer) -> None:
    async def stacks(question: bytes) -> bytes:
        return b"told: " + question

    name, job_id = "pod-0.example-17-a1", uuid4()
    worker = await open_as("worker")
    assert await Witness(worker.connection, name, stacks).prove(30.0)

    async def ask(role: str) -> Reply:
        settings = settings_for(guarded_nats.url, **nats_user(role))
        return await ask_stacks(settings, name, job_id=job_id, seconds=10.0)

    assert await ask("worker") == Reply(Answer.ALIVE, f"told: {job_id}".encode())
    for role in ("producer", "operator"):
        reply = await ask(role)
        assert (reply.answer, reply.content) == (Answer.UNKNOWN, b"")
        assert f'permissions violation for publish to "jsworker.worker.{name}.stack"' in str(reply.reason)


async def test_a_producer_publishes_and_a_worker_finds_the_message(
    harness_settings: Settings, guarded_settings: Callable[..., Settings], open_as: OpenAs
) -> None:
    operator = await open_as("operator")
    async with JobClient(harness_settings):  # pairs stream and database
        await operator.ensure(["echo"], WAITS)
    async with JobClient(guarded_settings("publisher", **nats_user("producer"))) as client:
        enqueued = await client.enqueue("echo", {}, unique_key="a")
        many = await client.enqueue_many("echo", [{}, {}])
        later = await client.enqueue("echo", {}, delay=60.0)
        assert not (await client.enqueue("echo", {}, unique_key="a")).created
        await client.publish_pending()
        assert client.unpublished_because is None
    worker = await open_as("worker")
    ids = {(await worker.get(number)).headers["Nats-Msg-Id"] for number in (1, 2, 3)}
    assert ids == {f"{job.id}:1" for job in (enqueued, *many)}
    assert later.created


async def test_an_application_hears_what_becomes_of_jobs(open_as: OpenAs, guarded_nats: NatsServer) -> None:
    worker = await open_as("worker")
    EventSender(worker.connection, worker.events, prefix="jobs", worker_id="worker-1")
    async with connected(guarded_nats, nats_user("producer")) as (client, complaints):
        listening = await client.subscribe("jobs.events.*.*")
        await client.flush()

        async def one_is_heard() -> str:  # sent at most once: none while a busy machine delays the connection
            worker.events.emit("job.completed", job_id="an id", kind="echo")
            await worker.flush()
            with suppress(nats.errors.TimeoutError):
                return str((await listening.next_msg(1.0)).subject)
            raise AssertionError("no event came")

        assert await eventually(one_is_heard) == "jobs.events.echo.completed"
        assert complaints == []


HEADERS = [
    b"",
    b"X",
    b"NATS/1.0",
    b"NATS/1.0 ",
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\nfoo\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 404 \xff\r\n\r\n",
    b"NATS/1.0 100 a\r\n\xff\xfe\r\n\r\n",
]
"""Blocks that a server passes on as they are; with the empty one a message has none."""


def publication(subject: bytes, reply: bytes, headers: bytes, content: bytes) -> bytes:
    """Return the command that publishes this."""
    sizes = b"%d %d" % (len(headers), len(headers + content)) if headers else b"%d" % len(content)
    line = b" ".join([b"HPUB" if headers else b"PUB", subject, *([reply] if reply else []), sizes])
    return b"%b\r\n%b%b\r\n" % (line, headers, content)


async def test_nothing_that_a_producer_publishes_disconnects_or_misleads_anybody(
    open_as: OpenAs, guarded_nats: NatsServer
) -> None:
    await (await open_as("operator")).ensure(["echo"], WAITS)
    worker, client = await open_as("worker"), await open_as("producer")
    hints, hinted = HintSender(worker.connection, report=lambda _: None), HintReceiver(client.connection)
    await hints.step()
    hinted.announce([uuid4()])
    assert await Witness(worker.connection, "pod-1-9-ff").prove(30.0)
    heard = worker.connection.client.inboxes
    desk = Desk(worker, kind="echo")
    desk.puller.begin()
    await until(lambda: desk.puller._credit.total == 10)
    assert len(heard) == 3

    odd = [bytes([byte]) for byte in range(256) if byte not in b" \t\r\n"]  # at which the server splits
    others = [b"jsworker.worker.pod-1-9-ff", b"jsworker.ended." + hinted._token.encode()]
    awaited = [b"jsworker.awaited.a%b%d" % (byte, number) for byte in odd for number in range(6)]
    subjects = [b"jsworker.awaited.0123456789abcdef", b"jobs.echo", b"jobs.echo.high", b"jobs.\x0becho"]
    attack = [publication(subject, b"", b"", b"x" * 16) for subject in awaited]
    attack += [publication(b"jobs.echo", reply, b"", b"{}") for reply in [*awaited, *others]]
    attack += [
        publication(subject, reply, headers, b"y" * size)
        for headers in HEADERS
        for subject in subjects
        for reply, size in [(b"", 0), (b"", 16), (b"7", 2), (b"a\x0c7", 16), *((each, 2) for each in others)]
    ]
    attack += [publication(subject, b"", HEADERS[-1], b"z" * 60_000) for subject in subjects]
    login = nats_user("producer")
    words = {"user": login["nats_user"], "pass": login["nats_password"], "headers": True, "verbose": False}
    reader, writer = await asyncio.open_connection(HOST, guarded_nats.port)
    reading = asyncio.create_task(reader.read())
    writer.write(b"CONNECT %b\r\n" % json.dumps(words).encode() + b"".join(attack) + b"PING\r\n")
    await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(60):
        assert b"PONG" in await reading
    writer.close()

    assert await worker.flush(30.0)
    assert await client.flush(30.0)
    reason = "ValueError: a message was dropped, because its headers cannot be read"
    assert worker.told_of("worker.degraded") == [{"what": "nats client", "reason": reason}]
    assert client.told == []
    assert worker.connection.client.inboxes is heard
    assert len(heard) == 3
    await client.publish(WireMessage(uuid4(), "echo", 1))
    await desk.has(1)
    await desk.puller.stop()
