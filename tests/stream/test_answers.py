"""What a delivery says, and what becomes of the answers to it."""

import asyncio
import signal
from uuid import uuid4

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.stream.message import WireMessage
from tests.stream.conftest import OpenDesk
from tests.stream.desk import publish, stored, until
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream


async def test_a_delivery_says_what_its_message_says(stream: TestStream, open_desk: OpenDesk) -> None:
    job = uuid4()
    published = await stream.publish(WireMessage(job, "resize", 7))
    stored = await stream.get(published.stream_seq)
    assert stored is not None
    desk = await open_desk(stream)
    await desk.has(1)
    [delivery] = desk.deliveries
    assert (delivery.job_id, delivery.kind, delivery.dispatch) == (job, "resize", 7)
    assert (delivery.subject, delivery.data) == ("jobs.resize", stored.data)
    assert delivery.stream_seq == published.stream_seq
    assert stored.time is not None
    assert abs((delivery.stored_at - stored.time).total_seconds()) < 1e-3
    assert str(job) in repr(delivery)
    assert not delivery.answered


async def test_answers(stream: TestStream, open_desk: OpenDesk) -> None:
    await publish(stream, 4)
    desk = await open_desk(stream)
    await desk.has(4)
    acked, naked, termed, late = desk.deliveries
    acked.ack()
    naked.nak()
    termed.term()
    started = asyncio.get_running_loop().time()
    late.nak(0.3)
    assert [each.answered for each in desk.deliveries] == [True] * 4
    await until(lambda: len(desk.deliveries) >= 5)  # the late one may have come by then, behind it
    again = desk.deliveries[4]
    assert (again.job_id, again.stored_at, again.answered) == (naked.job_id, naked.stored_at, False)
    again.ack()
    await desk.has(6)
    assert asyncio.get_running_loop().time() - started > 0.25
    assert desk.deliveries[5].job_id == late.job_id
    desk.deliveries[5].ack()
    await stored(stream, 0)


async def test_a_message_is_answered_once(stream: TestStream, open_desk: OpenDesk, plain: NatsClient) -> None:
    verdicts: list[bytes] = []

    async def hear(message: Msg) -> None:
        verdicts.append(message.data)

    await plain.subscribe("$JS.ACK.>", cb=hear)
    await plain.flush()
    await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    [delivery] = desk.deliveries
    delivery.in_progress()
    delivery.in_progress()
    delivery.nak(2.5)
    delivery.ack()
    delivery.nak()
    delivery.term()
    delivery.in_progress()
    assert await stream.flush()
    await plain.flush()
    assert verdicts == [b"+WPI", b"+WPI", b'-NAK {"delay":2500000000}']


async def test_in_progress_starts_ack_wait_anew(stream: TestStream, open_desk: OpenDesk) -> None:
    ack_wait = 4.0  # longer than a busy machine stands still: then it would have ended before
    await stream.ensure(["resize"], {"resize": ack_wait})
    await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    [delivery] = desk.deliveries
    clock = asyncio.get_running_loop().time
    for _ in range(2):
        await asyncio.sleep(0.25)
        said_at = clock()
        delivery.in_progress()
    await desk.has(2)
    assert clock() - said_at > ack_wait - 0.1
    assert desk.deliveries[1].job_id == delivery.job_id


async def test_an_answer_never_raises(stream: TestStream, open_desk: OpenDesk, server: NatsServer) -> None:
    await publish(stream, 3)
    desk = await open_desk(stream)
    await desk.has(3)
    first, second, third = desk.deliveries
    await server.stop(signal.SIGKILL)
    first.ack()
    await until(lambda: not stream.connected)
    second.ack()
    await desk.puller.stop()
    await stream.close()
    third.ack()
    third.in_progress()


async def test_an_ack_given_while_disconnected_arrives_after_the_reconnect(
    stream: TestStream, open_desk: OpenDesk, server: NatsServer
) -> None:
    await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    await server.stop(signal.SIGTERM)
    await until(lambda: not stream.connected)
    desk.deliveries[0].ack()
    await server.start()
    await until(lambda: stream.connected)
    await stored(stream, 0)


async def test_what_cannot_be_read_is_handed_over_with_the_rule_it_breaks(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    jetstream = plain.jetstream()
    await jetstream.publish("jobs.resize", b"not json")
    await jetstream.publish("jobs.resize", b'{"v":2}')
    [job] = await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    assert desk.jobs == [job]
    first, second = desk.unread
    assert (first.reason, first.data, first.stream_seq) == ("not JSON", b"not json", 1)
    assert second.reason == "wrong version: v must be 1"
    assert first.stored_at <= second.stored_at
    first.term()
    second.ack()
    await stored(stream, 1)


async def test_what_jetstream_did_not_send_is_refused(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    assert desk.puller._inbox is not None
    inbox = desk.puller._inbox.subject
    assert await stream.flush()  # else the server may not know of the inbox yet
    await plain.publish(f"{inbox}1", b"{}", reply="somewhere.else")
    await plain.publish(f"{inbox}1", b"")
    await plain.publish(f"{inbox}x", b"", headers={"Status": "409"})
    await plain.publish(f"{inbox}1", b"", headers={"Status": "?", "Nats-Pending-Messages": "-1"})
    await plain.flush()
    await until(lambda: len(stream.told_of("message.refused")) == 1)
    [job] = await publish(stream, 1)
    await desk.has(1)
    assert desk.jobs == [job]
    assert desk.unread == []
