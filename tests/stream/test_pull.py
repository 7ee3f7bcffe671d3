"""The pull loop: what there is room for, and no message lost or left behind by any accident."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.stream.delivery import Delivery, Undecodable
from jsworker.stream.publish import Published
from jsworker.stream.pull import Puller
from jsworker.stream.wire import WireMessage
from tests.stream.conftest import OpenStream, TestStream
from tests.stream.nats_server import NatsServer
from tests.support.polling import eventually


class Desk:
    """Takes deliveries as long as there is room, and lets tests answer them."""

    def __init__(self, stream: TestStream, *, room: int = 10, kind: str = "resize", **options: Any) -> None:
        self.places = room
        self.deliveries: list[Delivery] = []
        self.unread: list[Undecodable] = []
        self.puller = Puller(
            stream,
            kind,
            deliver=self.deliveries.append,
            undecodable=self.unread.append,
            room=lambda: self.places - len(self.deliveries),
            **options,
        )

    @property
    def jobs(self) -> list[UUID]:
        return [delivery.job_id for delivery in self.deliveries]

    async def ack_all(self) -> None:
        for delivery in self.deliveries:
            await delivery.ack()
        self.deliveries.clear()
        self.puller.wake()

    async def has(self, count: int, seconds: float = 10.0) -> None:
        async def check() -> None:
            assert len(self.deliveries) == count

        await eventually(check, seconds=seconds)


OpenDesk = Callable[..., Any]


@pytest.fixture
async def open_desk() -> AsyncIterator[OpenDesk]:
    async with AsyncExitStack() as opened:

        async def open_(stream: TestStream, **options: Any) -> Desk:
            desk = Desk(stream, **options)
            opened.push_async_callback(desk.puller.stop)
            await desk.puller.start()
            return desk

        yield open_


async def publish(stream: TestStream, count: int) -> list[UUID]:
    messages = [WireMessage(uuid4(), "resize", 1) for _ in range(count)]
    outcomes = await stream.publish_many(messages)
    assert all(isinstance(outcome, Published) for outcome in outcomes)
    return [message.job_id for message in messages]


async def stored(stream: TestStream, count: int) -> None:
    """Wait until the stream holds so many messages: the server works verdicts off behind our back."""

    async def check() -> None:
        assert (await stream.state()).messages == count

    assert await stream.flush()
    await eventually(check)


async def until(check: Callable[[], bool], seconds: float = 10.0) -> None:
    async def checked() -> None:
        assert check()

    await eventually(checked, seconds=seconds)


@asynccontextmanager
async def pulls_heard(plain: NatsClient) -> AsyncIterator[list[str]]:
    """Yield the requests of JetStream's API as they are made."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(f"{message.subject.removeprefix('$JS.API.')} {message.data.decode()}")

    subscription = await plain.subscribe("$JS.API.>", cb=hear)
    await plain.flush()
    yield heard
    await subscription.unsubscribe()


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
    assert stored.stored_at is not None
    assert abs((delivery.stored_at - stored.stored_at).total_seconds()) < 1e-3
    assert str(job) in repr(delivery)
    assert not delivery.answered


async def test_never_more_is_outstanding_than_there_is_room_for(
    stream: TestStream, open_desk: OpenDesk
) -> None:
    jobs = await publish(stream, 20)
    desk = await open_desk(stream, room=3)
    await desk.has(3)
    assert desk.jobs == jobs[:3]
    assert desk.puller.outstanding == 0
    assert (await stream.consumer_state("resize")).num_ack_pending == 3
    await desk.ack_all()
    await desk.has(3)
    assert desk.jobs == jobs[3:6]
    desk.places = 8
    desk.puller.wake()
    await desk.has(8)
    assert desk.jobs == jobs[3:11]
    state = await stream.consumer_state("resize")
    assert (state.num_ack_pending, state.num_pending, state.num_waiting) == (8, 9, 0)


async def test_a_flood_rides_in_few_requests(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    await publish(stream, 2000)
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=200)
        done = 0
        while done < 2000:
            await until(lambda: bool(desk.deliveries))
            done += len(desk.deliveries)
            await desk.ack_all()
        await plain.flush()
    assert len(heard) < 100
    await stored(stream, 0)


async def test_many_wakes_make_no_request_when_all_room_is_asked_for(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=5)
        await until(lambda: desk.puller.outstanding == 5)
        for _ in range(1000):
            desk.puller.wake()
            await asyncio.sleep(0)
        await stream.flush()
        await plain.flush()
    assert len(heard) == 1
    assert '"batch":5' in heard[0]


async def test_a_request_that_expires_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=5, expires=0.3, idle_heartbeat=0.1)
        await until(lambda: desk.puller._inbox is not None)
        inbox = desk.puller._inbox
        await until(lambda: len(heard) >= 3)
        assert desk.puller._inbox is inbox, "what the server owed is known: nothing has to be given up"
        [job] = await publish(stream, 1)
        await desk.has(1)
    assert desk.jobs == [job]
    assert not [request for request in heard if not request.startswith("CONSUMER.MSG.NEXT")]
    assert stream.told_of("worker.degraded") == []


async def test_answers(stream: TestStream, open_desk: OpenDesk) -> None:
    await publish(stream, 4)
    desk = await open_desk(stream)
    await desk.has(4)
    acked, naked, termed, late = desk.deliveries
    await acked.ack()
    await naked.nak()
    await termed.term()
    await late.nak(0.3)
    assert [each.answered for each in desk.deliveries] == [True] * 4
    await desk.has(5)
    again = desk.deliveries[4]
    assert (again.job_id, again.stored_at, again.answered) == (naked.job_id, naked.stored_at, False)
    await again.ack()
    started = asyncio.get_running_loop().time()
    await desk.has(6)
    assert asyncio.get_running_loop().time() - started > 0.15
    assert desk.deliveries[5].job_id == late.job_id
    await desk.deliveries[5].ack()
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
    await delivery.in_progress()
    await delivery.in_progress()
    await delivery.nak(2.5)
    await delivery.ack()
    await delivery.nak()
    await delivery.term()
    await delivery.in_progress()
    delivery.hand_back()
    assert await stream.flush()
    await plain.flush()
    assert verdicts == [b"+WPI", b"+WPI", b'-NAK {"delay":2500000000}']


async def test_in_progress_starts_ack_wait_anew(stream: TestStream, open_desk: OpenDesk) -> None:
    await stream.ensure(["resize"], {"resize": 0.5})
    await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    [delivery] = desk.deliveries
    loop = asyncio.get_running_loop()
    started = loop.time()
    while loop.time() - started < 1.0:
        await delivery.in_progress()
        assert len(desk.deliveries) == 1
        await asyncio.sleep(0.1)
    await desk.has(2)
    assert desk.deliveries[1].job_id == delivery.job_id


async def test_an_answer_never_raises(stream: TestStream, open_desk: OpenDesk, server: NatsServer) -> None:
    await publish(stream, 3)
    desk = await open_desk(stream)
    await desk.has(3)
    first, second, third = desk.deliveries
    await server.stop(signal.SIGKILL)
    await first.ack()
    await until(lambda: not stream.connected)
    await second.ack()
    await desk.puller.stop()
    await stream.close()
    await third.ack()
    await third.in_progress()


async def test_an_ack_given_while_disconnected_arrives_after_the_reconnect(
    stream: TestStream, open_desk: OpenDesk, server: NatsServer
) -> None:
    await publish(stream, 1)
    desk = await open_desk(stream)
    await desk.has(1)
    await server.stop(signal.SIGTERM)
    await until(lambda: not stream.connected)
    await desk.deliveries[0].ack()
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
    await first.term()
    await second.ack()
    await stored(stream, 1)


async def test_what_jetstream_did_not_send_is_refused(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    assert desk.puller._inbox is not None
    inbox = desk.puller._inbox.subject
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


async def test_stop_hands_back_at_once_what_is_on_its_way(
    open_stream: OpenStream, stream: TestStream, open_desk: OpenDesk
) -> None:
    jobs = await publish(stream, 20_000)
    desk = await open_desk(stream, room=20_000)
    await until(lambda: bool(desk.deliveries))
    taken = desk.jobs
    await desk.puller.stop()
    assert desk.jobs == taken, "nothing is delivered to one who stops"
    assert len(taken) < len(jobs), "some were on their way"
    second = await open_desk(await open_stream(), room=20_000)
    await second.has(len(jobs) - len(taken))
    assert set(second.jobs) == set(jobs) - set(taken)


async def test_after_stop_nothing_is_outstanding(
    stream: TestStream, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream, room=5)
    await until(lambda: desk.puller.outstanding == 5)
    await desk.puller.stop()
    assert (await stream.consumer_state("resize")).num_waiting == 0
    [job] = await publish(stream, 1)
    second = await open_desk(await open_stream())
    await second.has(1)
    assert second.jobs == [job]
    assert desk.deliveries == []
    await desk.puller.stop()


async def test_a_pause_hands_back_and_a_resume_pulls_again(
    stream: TestStream, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    desk.puller.pause()
    [first] = await publish(stream, 1)
    await until(lambda: desk.puller.outstanding == 0)
    second = await open_desk(await open_stream(), room=1)
    await second.has(1)
    assert second.jobs == [first]
    assert desk.deliveries == []
    desk.puller.resume()
    [next_job] = await publish(stream, 1)
    await desk.has(1)
    assert desk.jobs == [next_job]


async def test_requests_are_cancelled_when_the_room_shrinks_for_long(
    stream: TestStream, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    desk.places = 2
    desk.puller.wake()
    await until(lambda: desk.puller.outstanding == 2)
    await publish(stream, 5)
    await desk.has(2)
    assert (await stream.consumer_state("resize")).num_ack_pending == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_pulling_goes_on_after_a_restart_of_the_server(
    stream: TestStream, server: NatsServer, open_desk: OpenDesk, how: signal.Signals
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    await server.restart(how)
    await until(lambda: stream.connected)
    jobs = await publish(stream, 3)
    await desk.has(3, seconds=3)
    assert desk.jobs == jobs
    await until(lambda: desk.puller.outstanding == 7)


async def test_a_deleted_consumer_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    await plain.jetstream().delete_consumer("JOBS", "resize")
    [job] = await publish(stream, 1)
    await desk.has(1, seconds=3)
    assert desk.jobs == [job]
    assert (await stream.consumer_state("resize")).ack_wait == 600.0
    assert [told["what"] for told in stream.told_of("worker.degraded")] == ["consumer resize"]
    assert stream.told_of("worker.restored") == [{"what": "consumer resize"}]


async def test_a_deleted_stream_is_made_again(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    created = (await stream.state()).created
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    await plain.jetstream().delete_stream("JOBS")
    published = await stream.publish(WireMessage(uuid4(), "resize", 1))
    await desk.has(1, seconds=3)
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
    await desk.has(1, seconds=3)
    assert desk.jobs == [job]


async def test_missed_heartbeats_lead_to_a_new_request(
    stream: TestStream, open_stream: OpenStream, server: NatsServer, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream, expires=1.0, idle_heartbeat=0.2)
    await until(lambda: desk.puller.outstanding == 10)
    first = desk.puller._inbox
    server.freeze()
    await until(lambda: desk.puller._inbox is not first)
    server.thaw()
    jobs = await publish(stream, 3)
    await desk.has(3)
    assert desk.jobs == jobs
    assert stream.connected
    assert (await stream.consumer_state("resize")).num_ack_pending == 3


async def test_a_frozen_server_loses_no_message_that_it_sends_to_an_inbox_given_up(
    stream: TestStream, open_stream: OpenStream, server: NatsServer, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream, room=5, expires=30.0, idle_heartbeat=0.2)
    await until(lambda: desk.puller.outstanding == 5)
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
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    """The other one's heartbeats say that all is well."""
    jetstream = plain.jetstream()
    await jetstream.delete_consumer("JOBS", "resize")
    await jetstream.add_consumer(
        "JOBS", name="resize", durable_name="resize", filter_subject="jobs.resize", max_waiting=1
    )
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, room=2, expires=0.6, idle_heartbeat=0.1)
        await until(lambda: len(heard) == 1)
        desk.places = 10
        desk.puller.wake()
        await until(lambda: len(heard) == 2)
        assert ['"batch":2,' in heard[0], '"batch":8,' in heard[1]] == [True, True]
        await until(lambda: '"batch":10,' in heard[-1])


async def test_a_refusal_is_not_asked_for_in_a_hot_loop(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    async with pulls_heard(plain) as heard:
        desk = await open_desk(stream, expires=0.1, idle_heartbeat=0.1)  # a heartbeat must fit in twice
        await until(lambda: len(heard) >= 3)
        await asyncio.sleep(1.0)
        await plain.flush()
    assert len(heard) < 10
    assert desk.puller.outstanding == 0
    assert stream.told_of("worker.degraded") == [
        {
            "what": "consumer resize",
            "reason": "JetStream answered 400 Bad Request - heartbeat value too large",
        }
    ]


async def test_a_stream_that_cannot_be_made_again_is_not_tried_in_a_hot_loop(
    stream: TestStream, open_desk: OpenDesk, plain: NatsClient
) -> None:
    jetstream = plain.jetstream()
    desk = await open_desk(stream)
    await until(lambda: desk.puller.outstanding == 10)
    await jetstream.delete_stream("JOBS")
    await jetstream.add_stream(name="OTHER", subjects=["jobs.>"])
    async with pulls_heard(plain) as heard:
        await asyncio.sleep(1.5)
        await plain.flush()
    assert 1 < len(heard) < 40
    await jetstream.delete_stream("OTHER")
    await stream.publish(WireMessage(uuid4(), "resize", 1), timeout=10.0)
    await desk.has(1)


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


async def test_two_pullers_share_the_work(
    stream: TestStream, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    desks = [await open_desk(stream, room=10), await open_desk(await open_stream(), room=10)]
    for desk in desks:
        await until(lambda desk=desk: desk.puller.outstanding == 10)  # type: ignore[misc] # bound now
    jobs = await publish(stream, 20)
    for desk in desks:
        await desk.has(10)
    assert sorted(desks[0].jobs + desks[1].jobs) == sorted(jobs)


async def test_a_puller_that_never_started_may_be_stopped(stream: TestStream) -> None:
    desk = Desk(stream)
    await desk.puller.stop()
    await desk.puller.start()
    await desk.puller.join()


async def test_stopping_after_the_stream_was_closed(open_stream: OpenStream) -> None:
    stream = await open_stream()
    await stream.ensure(["resize"], {})
    desk = Desk(stream)
    await desk.puller.start()
    await until(lambda: desk.puller.outstanding == 10)
    await stream.close()
    async with asyncio.timeout(5):
        await desk.puller.stop()
