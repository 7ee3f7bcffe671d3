"""Hints at the ends of jobs on a real server: who gets them, and that no announcer can harm a worker."""

from uuid import UUID, uuid4

import pytest
from nats.aio.client import Client as NatsClient

from jsworker.stream import result_hints
from jsworker.stream.result_hints import AWAITED, ENDED, HintReceiver, HintSender
from tests.stream.conftest import OpenStream, StartServer
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually

TOKEN = "0123456789abcdef"

RESTRICTED = """
authorization { users: [
  { user: mute, password: secret, permissions: { publish: { deny: "jsworker.awaited.*" } } }
  { user: deaf, password: secret, permissions: { subscribe: { deny: "jsworker.ended.*" } } }
] }
"""


class Worker:
    """A worker's side, and what it has told of floods."""

    def __init__(self, stream: TestStream) -> None:
        self.reports: list[str | None] = []
        self.stream = stream
        self.hints = HintSender(stream.connection, report=self.reports.append)

    async def listens(self) -> "Worker":
        await self.hints.step()
        await self.stream.flush()
        return self

    async def has(self, *ids: UUID) -> None:
        """Wait until it knows that these, and no others, are waited for."""

        async def known() -> None:
            assert {*self.hints._recent, *self.hints._earlier} == {each.bytes for each in ids}

        await eventually(known)


class Client:
    """A client's side, and the hints that it got."""

    def __init__(self, stream: TestStream) -> None:
        self.got: list[UUID] = []
        self.stream = stream
        self.hints = HintReceiver(stream.connection)
        self.hints.take = self.got.append

    async def gets(self, *ids: UUID) -> None:
        async def has_got() -> None:
            assert self.got == list(ids)

        await eventually(has_got)


async def test_only_who_waits_gets_a_hint_and_once(open_stream: OpenStream, plain: NatsClient) -> None:
    worker = await Worker(await open_stream()).listens()
    client, other = Client(await open_stream()), Client(await open_stream())
    mine, common, nobodys = uuid4(), uuid4(), uuid4()
    everything = await plain.subscribe("jsworker.ended.>")
    await plain.flush()
    assert not worker.hints.somebody_waits
    client.hints.announce([mine, common])
    other.hints.announce([common])

    async def knows_both_clients() -> None:
        assert {each: len(tokens) for each, tokens in worker.hints._recent.items()} == {
            mine.bytes: 1,
            common.bytes: 2,
        }

    await eventually(knows_both_clients)
    assert worker.hints.somebody_waits
    for job_id in (nobodys, mine, common, common):
        worker.hints.tell(job_id)
    await client.gets(mine, common)
    await other.gets(common)
    await worker.stream.flush()
    await plain.flush()
    assert everything.pending_msgs == 3


async def test_what_is_not_said_again_is_forgotten(open_stream: OpenStream) -> None:
    worker, client = await Worker(await open_stream()).listens(), Client(await open_stream())
    kept, left = uuid4(), uuid4()
    client.hints.announce([kept, left])
    await worker.has(kept, left)
    await worker.hints.step()
    await worker.has(kept, left)
    client.hints.announce([kept])

    async def is_recent() -> None:
        assert kept.bytes in worker.hints._recent

    await eventually(is_recent)
    await worker.hints.step()
    await worker.has(kept)
    await worker.hints.step()
    await worker.has()
    assert not worker.hints.somebody_waits


async def test_many_at_once(open_stream: OpenStream) -> None:
    worker, client = await Worker(await open_stream()).listens(), Client(await open_stream())
    ids = [uuid4() for _ in range(10_000)]
    client.hints.announce(ids)
    await worker.has(*ids)
    for job_id in ids:
        worker.hints.tell(job_id)
    await client.gets(*ids)


async def test_both_go_on_after_a_lost_connection(open_stream: OpenStream, server: NatsServer) -> None:
    worker, client = await Worker(await open_stream()).listens(), Client(await open_stream())
    first, second = uuid4(), uuid4()
    client.hints.announce([first])
    await worker.has(first)
    await server.restart()

    async def connected() -> None:
        assert worker.stream.connected
        assert client.stream.connected

    await eventually(connected)
    await worker.stream.flush()
    client.hints.announce([first, second])
    await worker.has(first, second)
    worker.hints.tell(first)
    await client.gets(first)


async def test_without_a_connection_nothing_is_said(open_stream: OpenStream, server: NatsServer) -> None:
    worker, client = await Worker(await open_stream()).listens(), Client(await open_stream())
    job_id = uuid4()
    client.hints.announce([job_id])
    await worker.has(job_id)
    await server.stop()

    async def disconnected() -> None:
        assert not worker.stream.connected
        assert not client.stream.connected

    await eventually(disconnected)
    client.hints.announce([uuid4()])
    worker.hints.tell(job_id)
    await worker.hints.step()
    await worker.stream.close()
    await client.stream.close()
    client.hints.announce([uuid4()])
    worker.hints.tell(job_id)


class TestHostileAnnouncers:
    @pytest.mark.parametrize(
        ("subject", "content"),
        [
            (AWAITED + TOKEN, b"\0" * 15),
            (AWAITED + TOKEN, b"\0" * 16 * 2001),
            (AWAITED + TOKEN, b"\0" * 1_000_000),
            (AWAITED + TOKEN[:-1], b"\0" * 16),
            (AWAITED + TOKEN + "0", b"\0" * 16),
            (AWAITED + TOKEN[:-1] + "G", b"\0" * 16),
            (AWAITED + "$JS", b"\0" * 16),
            (AWAITED + "é" * 8, b"\0" * 16),
        ],
    )
    async def test_what_makes_no_sense_is_left_out(
        self, open_stream: OpenStream, plain: NatsClient, subject: str, content: bytes
    ) -> None:
        worker = await Worker(await open_stream()).listens()
        await plain.publish(subject, content)
        known = uuid4()
        await plain.publish(AWAITED + TOKEN, known.bytes)
        await worker.has(known)

    async def test_a_reply_subject_is_never_used(self, open_stream: OpenStream, plain: NatsClient) -> None:
        worker = await Worker(await open_stream()).listens()
        job_id = uuid4()
        elsewhere = await plain.subscribe("$JS.API.>")
        hints = await plain.subscribe(ENDED + TOKEN)
        await plain.publish(AWAITED + TOKEN, job_id.bytes, reply="$JS.API.STREAM.PURGE.JOBS")
        await worker.has(job_id)
        worker.hints.tell(job_id)
        assert (await hints.next_msg(timeout=60)).data == job_id.bytes
        assert elsewhere.pending_msgs == 0

    async def test_a_worker_remembers_so_much_and_no_more(
        self, open_stream: OpenStream, plain: NatsClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(result_hints, "_MOST_AWAITED", 3)
        worker = await Worker(await open_stream()).listens()
        ids = [uuid4() for _ in range(5)]
        for job_id in ids:
            await plain.publish(AWAITED + TOKEN, job_id.bytes)
        await worker.has(*ids[:3])
        # For one job, too: each end is told to few.
        for number in range(20):
            await plain.publish(f"{AWAITED}{number:016x}", ids[0].bytes)

        async def told() -> None:
            assert len(worker.hints._recent[ids[0].bytes]) == result_hints._MOST_CLIENTS

        await eventually(told)

    async def test_a_flood_is_not_listened_to_until_the_next_step(
        self, open_stream: OpenStream, plain: NatsClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(result_hints, "_MOST_A_SECOND", 40_000)  # two messages, however slow the machine
        worker = await Worker(await open_stream()).listens()

        async def flood(times: int) -> None:
            async def reported() -> None:
                for _ in range(5):
                    await plain.publish(AWAITED + TOKEN, b"".join(uuid4().bytes for _ in range(2000)))
                await plain.flush()
                assert len([each for each in worker.reports if each]) == times

            await eventually(reported)

        await flood(1)
        known = len(worker.hints._recent)
        await plain.publish(AWAITED + TOKEN, uuid4().bytes)
        await plain.flush()
        await worker.stream.flush()
        assert len(worker.hints._recent) == known
        for _ in range(3):
            await worker.listens()
        late = uuid4()
        await plain.publish(AWAITED + TOKEN, late.bytes)
        await worker.has(late)
        assert worker.reports[-1] is None
        # Again and again: the rest becomes longer.
        await flood(2)
        await worker.listens()
        await flood(3)
        for _ in range(2):
            await worker.listens()
            assert worker.hints._listening is None
        await worker.listens()
        assert worker.hints._listening is not None

    async def test_hints_of_strange_sizes_are_left_out(
        self, open_stream: OpenStream, plain: NatsClient
    ) -> None:
        client, job_id = Client(await open_stream()), uuid4()
        client.hints.announce([job_id])
        await client.stream.flush()
        for content in (b"", b"\0" * 15, b"\0" * 32, job_id.bytes):
            await plain.publish(ENDED + client.hints._token, content)
        await client.gets(job_id)


@pytest.mark.parametrize("user", ["mute", "deaf"])
async def test_a_client_without_the_permission_says_nothing_more(
    start_server: StartServer, open_stream: OpenStream, user: str
) -> None:
    server = await start_server(RESTRICTED)
    stream = await open_stream(url=server.url, nats_user=user, nats_password="secret")
    client = Client(stream)
    client.hints.announce([uuid4()])

    async def denied() -> None:
        assert client.hints._is_denied

    await eventually(denied)
    for _ in range(3):
        client.hints.announce([uuid4()])
    await stream.flush()
    [told] = stream.told_of("worker.degraded")
    assert told["what"] == "nats client"
    assert "jsworker." in told["reason"]
