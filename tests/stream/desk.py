"""Whoever takes the deliveries of a puller, as tests need them."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from jsworker.stream.message import Delivery, Undecodable, WireMessage
from jsworker.stream.publisher import Published
from jsworker.stream.puller import Puller
from tests.stream.streams import TestStream
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
            delivery.ack()
        self.deliveries.clear()
        self.puller.wake()

    async def has(self, count: int, seconds: float = 60.0) -> None:
        async def check() -> None:
            assert len(self.deliveries) == count

        await eventually(check, seconds=seconds)


async def publish(stream: TestStream, count: int) -> list[UUID]:
    messages = [WireMessage(uuid4(), "resize", 1) for _ in range(count)]
    outcomes = await stream.publish_many(messages, timeout=60.0)
    assert all(isinstance(outcome, Published) for outcome in outcomes)
    return [message.job_id for message in messages]


async def stored(stream: TestStream, count: int) -> None:
    """Wait until the stream holds so many messages: the server works verdicts off behind our back."""

    async def check() -> None:
        assert (await stream.state()).messages == count

    assert await stream.flush()
    await eventually(check)


async def until(check: Callable[[], bool], seconds: float = 60.0) -> None:
    async def checked() -> None:
        assert check()

    await eventually(checked, seconds=seconds)


async def edit_consumer(plain: NatsClient, **changes: Any) -> None:
    """Change settings that nats-py does not know."""
    config = json.loads((await plain.request("$JS.API.CONSUMER.INFO.JOBS.resize")).data)["config"] | changes
    request = json.dumps({"stream_name": "JOBS", "config": config, "action": "update"})
    answer = await plain.request("$JS.API.CONSUMER.CREATE.JOBS.resize.jobs.resize", request.encode())
    assert "error" not in json.loads(answer.data), answer.data


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
