"""JetStream's requests: what is asked, within which time, and what a refusal means."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from nats.js import JetStreamManager
from nats.js.api import ConsumerConfig, ConsumerInfo, StreamConfig, StreamInfo

from jsworker.core.errors import InvalidName, StreamRefused, StreamUnavailable
from jsworker.core.names import check_kind
from jsworker.stream.connection import Connection
from jsworker.stream.faults import ApiRefused, NotThere, api_faults
from jsworker.stream.wire import subject_of

T = TypeVar("T")

_SECONDS: Final = 5.0
_MESSAGE_ID: Final = "Nats-Msg-Id"
_MOST_SUBJECTS: Final = 500
"""That are looked at; whoever publishes may choose as many as there are words."""
_ASKED_AT_ONCE: Final = 20


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the stream holds.

    Attributes:
        created: when the stream was made; another time means another stream under the same name.
        first_seq: number of the oldest message; one above ``last_seq`` when there is none.
        last_seq: number of the newest message ever stored.
        messages: how many are stored.
        bytes: how large they are together.
        consumers: how many consumers there are.
    """

    created: datetime
    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    consumers: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """How far a kind's consumer is.

    Attributes:
        num_pending: messages that were never delivered.
        num_ack_pending: messages delivered and not answered.
        num_waiting: requests that wait for messages.
        ack_floor_stream_seq: every message of this kind up to this number was answered for good.
        ack_wait: seconds until an unanswered message is delivered again.
    """

    num_pending: int
    num_ack_pending: int
    num_waiting: int
    ack_floor_stream_seq: int
    ack_wait: float


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as the stream stores it.

    Attributes:
        stream_seq: its number.
        subject: where it was published.
        message_id: its ``Nats-Msg-Id``, which names job and dispatch; None when it has none.
        data: its content.
        stored_at: when it was stored (UTC).
    """

    stream_seq: int
    subject: str
    message_id: str | None
    data: bytes
    stored_at: datetime | None


class JetStreamApi:
    """JetStream's requests about one stream.

    Every method raises:
        NotThere: the stream, consumer or message does not exist.
        StreamUnavailable: nobody answered within 5 s; worth another try.
        StreamRefused: JetStream says no, or the server does not permit the request.
    """

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream

    async def stream_info(self) -> StreamInfo:
        """Return the stream's configuration and state."""
        return await self._ask(f"STREAM.INFO.{self._stream}", self._jetstream.stream_info(self._stream))

    async def create_stream(self, config: StreamConfig) -> StreamInfo:
        """Create the stream; the same one again is no error."""
        return await self._ask(f"STREAM.CREATE.{self._stream}", self._jetstream.add_stream(config))

    async def update_stream(self, config: StreamConfig) -> StreamInfo:
        """Change the stream."""
        return await self._ask(f"STREAM.UPDATE.{self._stream}", self._jetstream.update_stream(config))

    async def stream_of(self, subject: str) -> str:
        """Return the name of a stream that stores messages of this subject."""
        return await self._ask("STREAM.NAMES", self._jetstream.find_stream_name_by_subject(subject))

    async def consumer_info(self, name: str) -> ConsumerInfo:
        """Return a consumer's configuration and state."""
        request = self._jetstream.consumer_info(self._stream, name)
        info: ConsumerInfo = await self._ask(f"CONSUMER.INFO.{self._stream}.{name}", request)
        return info

    async def put_consumer(self, config: ConsumerConfig) -> ConsumerInfo:
        """Create or change a consumer."""
        subject = f"CONSUMER.CREATE.{self._stream}.{config.name}.{config.filter_subject}"
        return await self._ask(subject, self._jetstream.add_consumer(self._stream, config))

    async def consumers(self, offset: int) -> list[ConsumerInfo]:
        """Return a page of the stream's consumers by name, 256 at most; ``offset`` of them come before it."""
        request = self._jetstream.consumers_info(self._stream, offset)
        return await self._ask(f"CONSUMER.LIST.{self._stream}", request)

    async def stream_state(self) -> StreamState:
        """Return what the stream holds."""
        info = await self.stream_info()
        state = info.state
        if info.created is None:
            raise StreamRefused(f"stream {self._stream}: the server does not say when it was created")
        return StreamState(
            created=info.created,
            first_seq=state.first_seq,
            last_seq=state.last_seq,
            messages=state.messages,
            bytes=state.bytes,
            consumers=state.consumer_count,
        )

    async def consumer_state(self, name: str) -> ConsumerState:
        """Return how far a consumer is."""
        info = await self.consumer_info(name)
        return ConsumerState(
            num_pending=info.num_pending or 0,
            num_ack_pending=info.num_ack_pending or 0,
            num_waiting=info.num_waiting or 0,
            ack_floor_stream_seq=info.ack_floor.stream_seq if info.ack_floor else 0,
            ack_wait=info.config.ack_wait or 0.0,
        )

    async def unconsumed(self, prefix: str) -> dict[str, int]:
        """Return kinds whose messages no consumer takes, and how many they are; of very many, some.

        A kind is what stands behind the prefix in a subject; who published may have chosen any word.
        """
        request = self._jetstream.stream_info(self._stream, subjects_filter=subject_of(prefix, "*"))
        info = await self._ask(f"STREAM.INFO.{self._stream}", request)
        counted = {
            subject.removeprefix(subject_of(prefix, "")): messages
            for subject, messages in sorted((info.state.subjects or {}).items())[:_MOST_SUBJECTS]
        }
        at_once = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def has_consumer(kind: str) -> bool:
            async with at_once:
                try:
                    await self.consumer_info(check_kind(kind))
                except (NotThere, InvalidName):
                    return False
            return True

        found = await asyncio.gather(*map(has_consumer, counted))
        return {kind: counted[kind] for kind, is_taken in zip(counted, found, strict=True) if not is_taken}

    async def purge(self, subject: str, *, before: int) -> None:
        """Delete the messages of a subject whose number is smaller."""
        request = self._jetstream.purge_stream(self._stream, seq=before, subject=subject)
        await self._ask(f"STREAM.PURGE.{self._stream}", request)

    async def message(self, stream_seq: int) -> StoredMessage | None:
        """Return a stored message; None when there is none with this number."""
        if stream_seq < 1:
            return None
        request = self._jetstream.get_msg(self._stream, stream_seq)
        try:
            found = await self._ask(f"STREAM.MSG.GET.{self._stream}", request)
        except NotThere:
            return None
        headers = found.headers or {}
        return StoredMessage(
            stream_seq=stream_seq,
            subject=found.subject or "",
            message_id=headers.get(_MESSAGE_ID),
            data=found.data or b"",
            stored_at=found.time,
        )

    @property
    def _jetstream(self) -> JetStreamManager:
        return self._connection.client.jsm(timeout=_SECONDS)

    async def _ask(self, request: str, answer: Coroutine[Any, Any, T]) -> T:
        asking = asyncio.create_task(answer, name=request)
        try:
            with self._connection.hindrance_of(f"$JS.API.{request}") as hindrance:
                either: set[asyncio.Future[Any]] = {asking, hindrance}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                denial = hindrance.result()
                if denial is None:
                    raise StreamUnavailable(f"stream {self._stream}: the connection to NATS was lost")
                raise ApiRefused(f"stream {self._stream}", denial)
            with api_faults(f"stream {self._stream}"):
                return await asking
        finally:
            asking.cancel()
