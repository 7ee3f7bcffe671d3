"""The pull loop in good times: as much as there is room for, in few requests, and handed back at the end."""

import asyncio
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient

from tests.stream.conftest import OpenDesk, OpenStream
from tests.stream.desk import Desk, publish, pulls_heard, stored, until
from tests.stream.streams import TestStream
from tests.support.polling import eventually


async def test_never_more_is_outstanding_than_there_is_room_for(
    stream: TestStream, open_desk: OpenDesk
) -> None:
    jobs = await publish(stream, 20)
    desk = await open_desk(stream, room=3)
    await desk.has(3)
    assert desk.jobs == jobs[:3]
    assert desk.puller._credit.total == 0
    assert (await stream.consumer_state("resize")).num_ack_pending == 3
    await desk.ack_all()
    await desk.has(3)
    assert desk.jobs == jobs[3:6]
    desk.places = 8
    desk.puller.wake()
    await desk.has(8)
    assert desk.jobs == jobs[3:11]

    async def counted() -> None:
        state = await stream.consumer_state("resize")
        assert (state.num_ack_pending, state.num_pending, state.num_waiting) == (8, 9, 0)

    await eventually(counted)


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
        await until(lambda: desk.puller._credit.total == 5)
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
        desk.puller._idle_heartbeat = 60.0  # that a busy server is silent for a while is no reason
        await until(lambda: desk.puller._inbox is not None)
        inbox = desk.puller._inbox
        await until(lambda: len(heard) >= 3)
        assert desk.puller._inbox is inbox, "what the server owed is known: nothing has to be given up"
        [job] = await publish(stream, 1)
        await desk.has(1)
    assert desk.jobs == [job]
    assert not [request for request in heard if not request.startswith("CONSUMER.MSG.NEXT")]
    assert stream.told_of("worker.degraded") == []


async def test_stop_hands_back_at_once_what_is_on_its_way(
    open_stream: OpenStream, stream: TestStream, open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.stream.puller._STOP_SECONDS", 60.0)  # it is not given up on a busy machine
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
    await until(lambda: desk.puller._credit.total == 5)
    await desk.puller.stop()
    assert (await stream.consumer_state("resize")).num_waiting == 0
    [job] = await publish(stream, 1)
    second = await open_desk(await open_stream())
    await second.has(1)
    assert second.jobs == [job]
    assert desk.deliveries == []
    await desk.puller.stop()


async def test_stop_ends_a_puller_that_waits_to_send(stream: TestStream) -> None:
    """Behind a server that reads nothing; nats-py swallows what cancels it there."""
    client = stream.connection.client
    queue, full = client._flush_queue, asyncio.Queue[asyncio.Future[Any]](maxsize=1)
    full.put_nowait(asyncio.get_running_loop().create_future())
    client._flush_queue = full
    desk = Desk(stream)
    desk.puller.begin()
    await until(lambda: bool(full._putters))  # type: ignore[attr-defined] # nothing else tells who waits
    puller = desk.puller._task
    stopping = asyncio.create_task(desk.puller.stop())
    await until(lambda: puller is not None and puller.done())
    client._flush_queue = queue
    await stopping


async def test_requests_are_cancelled_when_the_room_shrinks_for_long(
    stream: TestStream, open_desk: OpenDesk
) -> None:
    desk = await open_desk(stream)
    await until(lambda: desk.puller._credit.total == 10)
    desk.places = 2
    desk.puller.wake()
    await until(lambda: desk.puller._credit.total == 2)
    await publish(stream, 5)
    await desk.has(2)
    assert (await stream.consumer_state("resize")).num_ack_pending == 2


async def test_two_pullers_share_the_work(
    stream: TestStream, open_stream: OpenStream, open_desk: OpenDesk
) -> None:
    desks = [await open_desk(stream, room=10), await open_desk(await open_stream(), room=10)]
    for desk in desks:
        await until(lambda desk=desk: desk.puller._credit.total == 10)  # type: ignore[misc] # bound now
    jobs = await publish(stream, 20)
    for desk in desks:
        await desk.has(10)
    assert sorted(desks[0].jobs + desks[1].jobs) == sorted(jobs)


async def test_a_puller_that_never_started_may_be_stopped(stream: TestStream) -> None:
    desk = Desk(stream)
    await desk.puller.stop()
    desk.puller.begin()
    assert desk.puller._task is None
