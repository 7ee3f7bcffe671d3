"""The pull loop in bad times: no accident of server, stream or consumer stops it or loses a message."""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.stream import api, puller, topology
from jsworker.stream.message import Delivery, WireMessage
from jsworker.stream.topology import Topology
from tests.stream.conftest import OpenDesk, OpenStream, StartServer
from tests.stream.desk import Desk, edit_consumer, publish, pulls_heard, until
from tests.stream.nats_server import HOST, NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually
from tests.support.proxy import proxied


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_pulling_goes_on_after_a_restart_of_the_server(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk, how: signal.Signals
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    await server.restart(how)
    await until(lambda: stream.connected)
    jobs = await publish(stream, 3)
    await desk.has(3)
    assert desk.jobs == jobs
    await until(lambda: desk.puller._credit.total == 7)


async def test_all_pullers_together_ask_once_whose_the_stream_is_after_a_reconnect(
    server: NatsServer,
    open_stream: OpenStream,
    open_desk: OpenDesk,
    plain: NatsClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "_PATIENCE_SECONDS", ())  # nor again while a busy server is silent
    monkeypatch.setattr(api, "_SECONDS", 60.0)
    async with proxied(server.url) as (proxy, url):
        stream = await open_stream(url=url)
        await stream.ensure(["resize", "shrink"])
        pullers = [(await open_desk(stream, kind=kind)).puller for kind in ("resize", "shrink")]
        await until(lambda: all(each._credit.total == 10 for each in pullers))
        async with pulls_heard(plain) as heard:
            proxy.cut()
            await until(lambda: not stream.connected)
            proxy.restore()
            await until(lambda: stream.connected and all(each._credit.total == 10 for each in pullers))
            assert await stream.flush()
            await plain.flush()
            assert [each.split()[0] for each in heard if each.startswith("STREAM.")] == ["STREAM.INFO.JOBS"]
        await stream.close()


@pytest.fixture
async def failures(
    start_server: StartServer, open_stream: OpenStream
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Give the URL of a stream, and what questions about it are answered with first; nothing: never."""
    between = 'mappings { "$JS.API.STREAM.INFO.JOBS": between, beyond: "$JS.API.STREAM.INFO.JOBS" }'
    server = await start_server(between)
    failures: list[bytes] = []

    async def pass_on(request: Msg) -> None:
        if not failures:
            await client.publish("beyond", request.data, reply=request.reply)
        elif answer := failures.pop():
            await client.publish(request.reply, answer)

    client = await nats.connect(server.url)
    await client.subscribe("between", cb=pass_on)
    await client.flush()
    await (await open_stream(url=server.url)).ensure(["resize"])
    yield server.url, failures
    await client.close()


async def test_whose_the_stream_is_is_asked_again_soon(
    failures: tuple[str, list[bytes]], open_stream: OpenStream
) -> None:
    """A cluster whose stream has no leader yet may never answer; everybody waits for this answer."""
    url, left = failures
    stream = await open_stream(url=url)
    left.append(b"")
    await stream.topology.check_installation()
    assert (left, stream.is_own) == ([], True)


async def test_a_question_that_fails_once_nobody_waits_for_it_any_more_is_no_error_of_the_event_loop(
    failures: tuple[str, list[bytes]], open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "_PATIENCE_SECONDS", ())
    monkeypatch.setattr(api, "_SECONDS", 1.0)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    url, left = failures
    stream = await open_stream(url=url)
    left.append(b"")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await stream.topology.check_installation()
    [asked] = [task for task in asyncio.all_tasks() if task.get_name() == "check installation"]
    await asyncio.wait({asked})
    del asked
    stream.topology._checking = None
    gc.collect()
    assert errors == []


async def test_a_connection_that_is_lost_right_behind_the_answer_is_asked_about(
    failures: tuple[str, list[bytes]], open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_own, losses = Topology._note_own, [1]

    def noted(self: Topology, checked: int) -> None:
        def lose() -> None:
            self._api.connection.losses += losses.pop() if losses else 0

        note_own(self, checked)
        asyncio.get_running_loop().call_soon(lose)

    monkeypatch.setattr(Topology, "_note_own", noted)
    stream = await open_stream(url=failures[0])
    await stream.topology.check_installation()
    assert (losses, stream.is_own) == ([], True)


async def test_one_failure_to_learn_whose_the_stream_is_is_not_reported(
    failures: tuple[str, list[bytes]], open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    url, left = failures
    stream = await open_stream(url=url)
    left.append(b'{"error": {"code": 503, "err_code": 10008}}')
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    assert (left, stream.told_of("worker.degraded")) == ([], [])


async def test_failures_to_learn_whose_the_stream_is_are_reported(
    failures: tuple[str, list[bytes]], open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    url, left = failures
    stream = await open_stream(url=url)
    left += [b'{"error": {"code": 503, "err_code": 10008}}'] * 20
    await open_desk(stream)
    await until(lambda: bool(stream.told_of("worker.degraded")))
    [told] = stream.told_of("worker.degraded")
    assert told["what"] == "consumer resize"
    assert len(left) > 10


async def request_waits(stream: TestStream) -> None:
    """Wait until a request is at the server: one behind a deletion gets a 503, as from a stopping server."""

    async def waits() -> None:
        assert (await stream.consumer_state("resize")).num_waiting == 1

    await eventually(waits)


async def test_a_deleted_consumer_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    desk = await open_desk(stream)
    await request_waits(stream)
    await plain.jetstream().delete_consumer("JOBS", "resize")
    [job] = await publish(stream, 1)
    await desk.has(1)
    assert desk.jobs == [job]
    assert (await stream.consumer_state("resize")).config.ack_wait == 600.0
    assert [told["what"] for told in stream.told_of("worker.degraded")] == ["consumer resize"]
    assert stream.told_of("worker.restored") == [{"what": "consumer resize"}]


async def test_a_deleted_stream_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    created = (await stream.state()).created
    desk = await open_desk(stream)
    await request_waits(stream)
    await plain.jetstream().delete_stream("JOBS")
    published = await stream.publish(WireMessage(uuid4(), "resize", 1), timeout=60.0)
    await desk.has(1)
    assert (published.stream_seq, desk.deliveries[0].stream_seq) == (1, 1)
    state = await stream.state()
    assert state.created > created
    assert ("stream JOBS", "created") in {
        (told["what"], told["setting"]) for told in stream.told_of("stream.changed")
    }


async def test_a_consumer_that_was_deleted_while_nobody_was_connected(
    stream: TestStream, open_desk: OpenDesk, server: NatsServer, plain: NatsClient
) -> None:
    desk = await open_desk(stream, room=0)
    await plain.jetstream().delete_consumer("JOBS", "resize")
    desk.places = 10
    desk.puller.wake()
    [job] = await publish(stream, 1)
    await desk.has(1)
    assert desk.jobs == [job]
    assert stream.told_of("worker.degraded") == []  # it was there again after a moment


async def test_a_consumer_that_is_never_there_is_told(
    start_server: StartServer, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    server = await start_server('mappings { "$JS.API.CONSUMER.MSG.NEXT.JOBS.resize": nowhere }')
    stream = await open_stream(url=server.url)
    await stream.ensure(["resize"])
    await open_desk(stream)
    await until(lambda: bool(stream.told_of("worker.degraded")))
    assert stream.told_of("worker.degraded") == [
        {"what": "consumer resize", "reason": "JetStream answered 503"}
    ]


async def test_jobs_are_looked_for_in_the_table_from_the_first_refusal_on(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream, idle_heartbeat=1.0)
    await until(lambda: desk.puller._credit.total == 10)
    assert desk.puller.is_pulling
    server._signal(signal.SIGUSR2)  # it stops JetStream, and keeps the connections for ten seconds
    await until(lambda: not desk.puller.is_pulling)
    assert stream.told_of("worker.degraded") == []
    assert stream.connected


async def test_a_connection_that_is_lost_while_a_consumer_is_looked_for_is_told_once(
    start_server: StartServer, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    server = await start_server()
    stream = await open_stream(url=server.url)
    await stream.ensure(["resize"])
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    server.freeze()
    desk.puller._gone, desk.puller._failures = True, 1
    desk.puller.wake()
    await until(lambda: desk.puller._inbox is None)  # it has asked
    await server.stop(signal.SIGKILL)
    await until(lambda: desk.puller._failures == 2)  # it has no answer
    assert [told["what"] for told in stream.told_of("worker.degraded")] == ["nats"]
    assert not stream.connected


async def test_missed_heartbeats_lead_to_a_new_request(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "_PONG_SECONDS", 0.1)
    desk = await open_desk(stream, expires=1.0, idle_heartbeat=0.2)
    await until(lambda: desk.puller._credit.total == 10)
    first = desk.puller._inbox
    server.freeze()
    await until(lambda: desk.puller._inbox is not first)
    await asks_again(desk)
    await asks_again(desk)
    assert stream.told_of("worker.degraded") == []  # who answers nothing has not forgotten anything
    server.thaw()
    jobs = await publish(stream, 3)
    await desk.has(3)
    assert desk.jobs == jobs
    assert stream.connected
    assert (await stream.consumer_state("resize")).num_ack_pending == 3


async def test_requests_whose_heartbeats_were_only_late_are_not_told_to_be_lost(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is stopped for a moment, twice in a minute, sends them right behind its PONG."""
    monkeypatch.setattr(puller, "_PONG_SECONDS", 60.0)  # the moment may be a long one
    desk = await open_desk(stream, expires=30.0, idle_heartbeat=0.5)
    await until(lambda: desk.puller._credit.total == 10)
    for _ in range(2):
        first, heard_at = desk.puller._inbox, desk.puller._heard_at
        server.freeze()
        await until(lambda: bool(stream.connection.client._pongs))
        server.thaw()
        await until(lambda since=heard_at: desk.puller._heard_at > since + 1.5)  # type: ignore[misc]
        assert desk.puller._inbox is first
    assert stream.told_of("worker.degraded") == []


async def test_a_frozen_server_loses_no_message_that_it_sends_to_an_inbox_given_up(
    stream: TestStream, open_stream: OpenStream, server: NatsServer, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream, room=5, expires=30.0, idle_heartbeat=0.2)
    await until(lambda: desk.puller._credit.total == 5)
    other = await open_stream()
    first = desk.puller._inbox
    server.freeze()
    publishing = asyncio.create_task(publish(other, 5))
    await until(lambda: desk.puller._inbox is not first)
    server.thaw()
    jobs = await publishing
    await desk.has(5)
    assert sorted(desk.jobs) == sorted(jobs)


async def test_a_request_that_the_server_forgets_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    """With more waiting requests than ``max_waiting`` a server says nothing."""
    jetstream = plain.jetstream()
    await jetstream.delete_consumer("JOBS", "resize")
    await jetstream.add_consumer(
        "JOBS", name="resize", durable_name="resize", filter_subject="jobs.resize", max_waiting=1
    )
    inbox, request = plain.new_inbox(), b'{"batch":1,"expires":700000000}'
    occupying = await plain.subscribe(inbox)
    await plain.publish("$JS.API.CONSUMER.MSG.NEXT.JOBS.resize", request, reply=inbox)
    await plain.flush()
    desk = await open_desk(stream, room=2, expires=0.4, idle_heartbeat=0.1)
    await until(lambda: desk.puller._request >= 2)
    assert ((await occupying.next_msg(5)).headers or {})["Status"] == "408"
    jobs = await publish(stream, 2)
    await desk.has(2)
    assert desk.jobs == jobs


async def test_a_request_that_the_server_forgets_beside_another_is_found(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's heartbeats say that all is well."""
    monkeypatch.setattr(puller, "_PONG_SECONDS", 60.0)  # also those of a server that stood still
    jetstream = plain.jetstream()
    await jetstream.delete_consumer("JOBS", "resize")
    await jetstream.add_consumer(
        "JOBS", name="resize", durable_name="resize", filter_subject="jobs.resize", max_waiting=1
    )
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=2, expires=30.0, idle_heartbeat=0.3)
        await until(lambda: len(heard) == 1)
        desk.puller._limits = desk.puller._limits._replace(expires=0.6)
        desk.places = 10
        desk.puller.wake()
        await until(lambda: len(heard) >= 2)
        assert ['"batch":2,' in heard[0], '"batch":8,' in heard[1]] == [True, True]
        await until(lambda: '"batch":10,' in heard[-1])


@pytest.mark.parametrize(
    ("limit", "asked"),
    [({"max_batch": 3}, '"batch":3,'), ({"max_expires": 1_500_000_000}, '"expires":1500000000,')],
)
async def test_no_more_is_asked_for_than_a_consumer_allows(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient, limit: dict[str, int], asked: str
) -> None:
    await edit_consumer(plain, **limit)
    jobs = await publish(stream, 18)
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=9)
        await desk.has(9)
        assert sorted(desk.jobs) == sorted(jobs[:9])
        await desk.ack_all()
        await desk.has(9)
        await desk.ack_all()
        await until(lambda: desk.puller._credit.total == 9)
        await plain.flush()
    assert any(asked in request for request in heard)
    assert len(heard) < 40
    assert stream.told_of("worker.degraded") == []


async def test_a_limit_is_forgotten_with_the_connection(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk, plain: NatsClient
) -> None:
    await edit_consumer(plain, max_batch=3)
    desk = await open_desk(stream, room=9)
    await until(lambda: desk.puller._limits.most == 3)  # nine are outstanding until the refusal comes
    await until(lambda: desk.puller._credit.total == 9)
    await edit_consumer(plain, max_batch=0)
    await server.restart(signal.SIGTERM)
    jobs = await publish(stream, 3)
    await desk.has(3)
    assert desk.jobs == jobs
    assert desk.puller._limits.most > 9


async def test_a_refusal_is_not_asked_for_in_a_hot_loop(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, expires=0.1, idle_heartbeat=0.1)  # a heartbeat must fit in twice
        await until(lambda: len(heard) >= 3)
        await asyncio.sleep(1.0)
        await plain.flush()
    assert len(heard) < 10
    await until(lambda: desk.puller._credit.total == 0)  # once the answer to the last one has come
    assert stream.told_of("worker.degraded") == [
        {
            "what": "consumer resize",
            "reason": "JetStream answered 400 Bad Request - heartbeat value too large",
        }
    ]


async def test_a_stream_that_cannot_be_made_again_is_not_tried_in_a_hot_loop(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    def reasons() -> list[str]:
        return [told["reason"] for told in stream.told_of("worker.degraded")]

    jetstream = plain.jetstream()
    desk = await open_desk(stream)
    await request_waits(stream)
    desk.puller._paused_until = time.monotonic() + 3600.0  # else it may be made again before there is OTHER
    await jetstream.delete_stream("JOBS")
    await jetstream.add_stream(name="OTHER", subjects=["jobs.>"])
    async with pulls_heard(plain) as heard:
        desk.puller._paused_until = 0.0
        desk.puller.wake()
        await until(lambda: len(heard) > 1)
        await until(lambda: any("stream OTHER overlaps" in reason for reason in reasons()))
        await asyncio.sleep(1.0)
        await plain.flush()
    assert len(heard) < 40
    assert len(reasons()) == len(set(reasons()))
    await jetstream.delete_stream("OTHER")
    await stream.publish(WireMessage(uuid4(), "resize", 1), timeout=60.0)
    await desk.has(1)


USERS = """authorization { users: [
  { user: all, password: a }
  { user: worker, password: b, permissions: { publish: { deny: [%s] } } }
] }"""
SUBSCRIBERS = USERS.replace("publish", "subscribe")


def denied(subject: str) -> dict[str, str]:
    return {"what": "consumer resize", "reason": f'permissions violation for publish to "{subject}"'}


async def asks_again(desk: Desk) -> None:
    request = desk.puller._request
    await until(lambda: desk.puller._request > request)


async def works_again(desk: Desk, stream: TestStream, complaint: dict[str, str]) -> None:
    """Wait for a message; the complaint came once and is over."""
    await desk.has(1)
    assert desk.puller.is_pulling
    assert {"what": "consumer resize"} in stream.told_of("worker.restored")
    assert stream.told_of("worker.degraded").count(complaint) == 1


async def test_a_missing_right_to_ask_for_messages_is_told_until_it_is_given(
    open_stream: OpenStream, open_desk: OpenDesk, start_server: StartServer
) -> None:
    server = await start_server(USERS % '"$JS.API.CONSUMER.MSG.NEXT.>"')
    everyone = await open_stream(url=f"nats://all:a@{HOST}:{server.port}")
    await everyone.ensure(["resize"], {"resize": 600.0})
    stream = await open_stream(url=f"nats://worker:b@{HOST}:{server.port}")
    desk = await open_desk(stream)
    await until(lambda: desk.puller._request > 2)  # and asks again before a silence would show
    assert denied("$js.api.consumer.msg.next.jobs.resize") in stream.told_of("worker.degraded")
    assert not desk.puller.is_pulling
    assert '"$js.api.consumer.msg.next.jobs.resize"' in desk.puller.reason
    server.configure(USERS % "nothing")
    server.reload()
    await publish(everyone, 1)
    await works_again(desk, stream, denied("$js.api.consumer.msg.next.jobs.resize"))


async def test_a_missing_right_to_receive_messages_is_told_until_it_is_given(
    open_stream: OpenStream, open_desk: OpenDesk, start_server: StartServer
) -> None:
    server = await start_server(SUBSCRIBERS % "nothing")
    everyone = await open_stream(url=f"nats://all:a@{HOST}:{server.port}")
    await everyone.ensure(["resize"], {"resize": 600.0})
    stream = await open_stream(url=f"nats://worker:b@{HOST}:{server.port}")
    desk = await open_desk(stream)
    await asks_again(desk)
    server.configure(SUBSCRIBERS % '"_INBOX.>"')
    server.reload()
    reason = 'permissions violation for subscription to "_INBOX.>" (see JSWORKER_NATS_INBOX_PREFIX)'
    await until(lambda: desk.puller.reason == reason)
    for _ in range(2):
        await asks_again(desk)
    assert not desk.puller.is_pulling
    server.configure(SUBSCRIBERS % "nothing")
    server.reload()
    await publish(everyone, 1)
    await works_again(desk, stream, {"what": "consumer resize", "reason": reason})


async def test_a_missing_right_to_acknowledge_is_told_until_it_is_given(
    open_stream: OpenStream,
    open_desk: OpenDesk,
    start_server: StartServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await start_server(USERS % '"$JS.ACK.>"')
    everyone = await open_stream(url=f"nats://all:a@{HOST}:{server.port}")
    await everyone.ensure(["resize"], {"resize": 600.0})
    stream = await open_stream(url=f"nats://worker:b@{HOST}:{server.port}")
    desk = await open_desk(stream, expires=0.6, idle_heartbeat=0.2)
    for _ in range(3):  # a delivery and signs of life follow a refusal
        await publish(everyone, 1)
        await desk.has(1)
        await desk.ack_all()
        await asks_again(desk)
    assert stream.told_of("worker.degraded").count(denied("$js.ack.jobs.resize.>")) == 1
    assert not desk.puller.is_pulling
    assert stream.told_of("worker.restored") == []
    monkeypatch.setattr(puller, "_DENIED_SECONDS", 0.0)
    await until(lambda: desk.puller.is_pulling)
    assert stream.told_of("worker.restored") == [{"what": "consumer resize"}]


IMPORTED = """
accounts {{
  STORE {{
    jetstream: enabled, users: [{{ user: store, password: x }}]
    exports: [{{ service: "$JS.API.>"{responses} }}, {{ service: "$JS.ACK.>" }}, {{ service: "jobs.>" }}]
  }}
  APP {{
    users: [{{ user: app, password: x }}]
    imports: [
      {{ service: {{ account: STORE, subject: "$JS.API.>" }} }}
      {{ service: {{ account: STORE, subject: "$JS.ACK.>" }} }}
      {{ service: {{ account: STORE, subject: "jobs.>" }} }}
    ]
  }}
}}
"""


async def test_a_jetstream_of_another_account_that_sends_one_answer_is_told_until_it_sends_all(
    start_server: StartServer, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    """An export sends one answer to each request, unless it says otherwise: the other messages are lost."""
    server = await start_server(IMPORTED.format(responses=""))
    stream = await open_stream(url=f"nats://app:x@{HOST}:{server.port}")
    await stream.ensure(["resize"])
    desk = await open_desk(stream, expires=1.0, idle_heartbeat=0.2)
    await until(lambda: "response_type: stream" in desk.puller.reason)
    assert not desk.puller.is_pulling
    assert [told["what"] for told in stream.told_of("worker.degraded")] == ["consumer resize"]
    server.configure(IMPORTED.format(responses=", response_type: stream"))
    server.reload()
    await until(lambda: desk.puller.is_pulling)
    assert stream.told_of("worker.restored")[-1] == {"what": "consumer resize"}


async def test_a_fault_of_the_receiver_does_not_end_the_connection(
    stream: TestStream, open_desk: OpenDesk
) -> None:
    def refuse(_: Delivery) -> None:
        raise TypeError("a mistake")

    desk = await open_desk(stream)
    desk.puller._deliver = refuse
    await publish(stream, 1)
    await until(lambda: bool(stream.told_of("worker.degraded")))
    assert stream.told_of("worker.degraded") == [{"what": "nats client", "reason": "TypeError: a mistake"}]
    desk.puller._deliver = desk.deliveries.append
    [job] = await publish(stream, 1)
    await desk.has(1)
    assert desk.jobs == [job]


async def test_a_mistake_that_ends_the_loop_is_told(stream: TestStream, open_desk: OpenDesk) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    joining = asyncio.create_task(desk.puller.join())

    def no_room() -> int:
        raise RuntimeError("a mistake")

    desk.puller._room = no_room
    desk.puller.wake()
    with pytest.raises(RuntimeError, match="a mistake"):
        await joining
    with pytest.raises(RuntimeError, match="a mistake"):
        await desk.puller.stop()
    assert stream.told_of("worker.degraded") == [
        {"what": "consumer resize", "reason": "RuntimeError: a mistake"}
    ]


async def test_joining_ends_when_the_puller_is_stopped(stream: TestStream, open_desk: OpenDesk) -> None:
    desk = await open_desk(stream)
    joining = asyncio.create_task(desk.puller.join())
    await until(lambda: desk.puller._credit.total == 10)
    assert not joining.done()
    await desk.puller.stop()
    await joining


async def test_stopping_after_the_stream_was_closed(open_stream: OpenStream) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], {})
    desk = Desk(stream)
    desk.puller.begin()
    await until(lambda: desk.puller._credit.total == 10)
    await stream.close()
    async with asyncio.timeout(5):
        await desk.puller.stop()
