"""Publishing: many messages at once, each acknowledged by the stream or sent again."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Final, NamedTuple, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from jsworker.core.errors import MessageUnfit, PublishFailed, PublishRefused, StreamRefused, StreamUnavailable
from jsworker.core.names import check_kind
from jsworker.core.priorities import NORMAL
from jsworker.core.settings import Settings
from jsworker.stream.connection import Connection
from jsworker.stream.message import LIMIT_BYTES, WireMessage, encode, header_block, message_id, subject_of
from jsworker.stream.nats_client import Client
from jsworker.stream.topology import Topology

_WINDOW: Final = 512  # unacknowledged messages of one call: enough that neither side waits for the other
_SILENCE_SECONDS: Final = 2.0  # without any acknowledgement; then unacknowledged messages are sent again
_UNAVAILABLE: Final = 503
_FULL: Final = frozenset({10023, 10047, 10077})
"""JetStream's error codes for no room on the server, in its storage or in the stream; these last longer."""
_IN_PROCESS: Final = 10158
"""JetStream's error code for a message that was sent before and still waits for a majority of the servers."""
_SILENT: Final = "the stream did not answer"
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0

Headers = Mapping[str, str]


class Published(NamedTuple):
    """The stream has the message, or had it already; ``stream_created`` is None if never asked for."""

    stream_seq: int
    stream_created: datetime | None
    duplicate: bool


PublishOutcome = Published | PublishFailed


class _ApiError(TypedDict):
    code: int
    err_code: NotRequired[int]
    description: NotRequired[str]


class _PubAck(TypedDict):
    stream: NotRequired[str]
    seq: NotRequired[Annotated[int, Field(ge=0)]]
    duplicate: NotRequired[bool]
    error: NotRequired[_ApiError]


_validate = TypeAdapter(_PubAck).validator.validate_json


class Publisher:
    """Publishes messages on ``<prefix>.<kind>``, to be acknowledged by the settings' stream.

    Nothing is published into another installation's stream, which is checked anew after each loss of the
    connection.

    If its topology ``has_lanes``, messages of another priority than normal have subjects of their own; else
    they share the kind's subject, and workers learn their priority from the row.

    ``late`` counts acknowledgements of messages that were given up before.
    """

    def __init__(self, connection: Connection, settings: Settings, topology: Topology) -> None:
        self.stream_created: datetime | None = None
        self.late = 0
        self._connection = connection
        self._topology = topology
        self._stream = settings.stream
        self._prefix = settings.subject_prefix
        self._client: Client | None = None
        self._inbox = ""
        self._token = 0
        self._batches: dict[int, _Batch] = {}
        connection.lost_callbacks.append(self._interrupt)

    async def publish(
        self, messages: Sequence[WireMessage], headers: Sequence[Headers | None] | None, seconds: float
    ) -> list[PublishOutcome]:
        """Publish and wait for the acknowledgements; see ``Stream.publish_many``."""
        batch = _Batch(messages, headers, self._stream, seconds)
        try:
            await self._send_missing(batch)
            pause = _FIRST_PAUSE_SECONDS
            while batch.missing() and (left := batch.seconds_left()) > 0:
                await asyncio.sleep(min(random.uniform(0, pause), left))  # noqa: S311 -- spreads a fleet
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                await self._send_missing(batch)
        except StreamUnavailable as fault:
            batch.reason = str(fault)
        except StreamRefused as refused:
            for index in batch.missing():
                batch.fail(index, str(refused), PublishRefused)
        finally:
            self._forget(batch)
        return batch.outcomes(self.stream_created)

    async def _send_missing(self, batch: "_Batch") -> None:
        """Send the messages without an outcome, at most a window ahead of the acknowledgements."""
        self._forget(batch)
        if not await self._connection.wait_connected(batch.seconds_left()):
            batch.reason = "NATS is not connected"
            return
        try:
            async with asyncio.timeout(max(batch.seconds_left(), 0.0)):
                await self._topology.check_installation()
        except TimeoutError:
            batch.reason = _SILENT
            return
        except StreamUnavailable as fault:  # if the connection is closed, the next try ends
            batch.reason = str(fault)
            return
        client = self._connection.client
        if client is not self._client:
            # Acknowledgements come to one inbox; their subject ends in the message's token.
            self._client = client
            self._inbox = f"{client.new_inbox()}."
            client.open_inbox(f"{self._inbox}*", self._on_acknowledgement)
        batch.interrupted = False
        for index in batch.missing():
            if len(batch.under_way) >= _WINDOW:
                await batch.wait_for(_WINDOW // 2)
            if batch.interrupted:
                return
            self._send(client, batch, index)
        await batch.wait_for(0)

    def _send(self, client: Client, batch: "_Batch", index: int) -> None:
        message = batch.messages[index]
        try:
            headers = header_block(message, batch.headers[index] if batch.headers else None)
            priority = message.priority if self._topology.has_lanes else NORMAL
            subject = _checked_subject(self._prefix, message.kind, priority)
        except ValueError as fault:
            batch.fail(index, str(fault), MessageUnfit)
            return
        content = encode(message)
        if len(headers) + len(content) > LIMIT_BYTES:
            batch.fail(index, f"with its headers it is larger than {LIMIT_BYTES} bytes", MessageUnfit)
            return
        self._token += 1
        self._batches[self._token] = batch
        batch.under_way[self._token] = index
        client.post(subject, content, f"{self._inbox}{self._token}", headers)

    def _on_acknowledgement(
        self, subject: str, _reply: bytes, data: bytes, _headers: dict[str, str] | None
    ) -> None:
        token = subject[len(self._inbox) :]
        batch = self._batches.pop(int(token), None) if token.isdigit() else None
        if batch is not None:
            batch.settle(int(token), data)
        elif self._acknowledges(data):
            self.late += 1

    def _acknowledges(self, data: bytes) -> bool:
        try:
            ack: _PubAck = _validate(data)
        except ValidationError:
            return False
        return ack.get("stream") == self._stream and "seq" in ack and "error" not in ack

    def _interrupt(self) -> None:
        self._client = None
        for batch in set(self._batches.values()):
            batch.interrupt("the connection to NATS was lost")

    def _forget(self, batch: "_Batch") -> None:
        for token in batch.under_way:
            self._batches.pop(token, None)
        batch.under_way.clear()


@lru_cache(maxsize=1_000)  # limited, because producers may invent any number of kinds
def _checked_subject(prefix: str, kind: str, priority: int) -> str:
    return subject_of(prefix, check_kind(kind), priority)


class _Batch:
    """The messages of one call: those under way, and the outcomes of the others."""

    def __init__(
        self,
        messages: Sequence[WireMessage],
        headers: Sequence[Headers | None] | None,
        stream: str,
        seconds: float,
    ) -> None:
        if headers is not None and len(headers) != len(messages):
            raise ValueError(f"{len(headers)} headers for {len(messages)} messages")
        self.messages = messages
        self.headers = headers
        self.under_way: dict[int, int] = {}
        self.interrupted = False
        self.reason = ""
        self._stream = stream
        self._seconds = seconds
        self._outcomes: list[_PubAck | PublishFailed | None] = [None] * len(messages)
        self._clock = asyncio.get_running_loop().time
        self._progress_at = self._clock()
        self._most = 0
        self._moved = asyncio.Event()

    def missing(self) -> list[int]:
        return [index for index, outcome in enumerate(self._outcomes) if outcome is None]

    def seconds_left(self) -> float:
        return self._progress_at + self._seconds - self._clock()

    async def wait_for(self, most: int) -> None:
        """Wait until at most ``most`` are under way, the connection is lost or the server is silent."""
        self._most = most
        while len(self.under_way) > most and not self.interrupted:
            self._moved.clear()
            try:
                async with asyncio.timeout(min(_SILENCE_SECONDS, max(self.seconds_left(), 0.0))):
                    await self._moved.wait()
            except TimeoutError:
                if self._clock() - self._progress_at >= min(_SILENCE_SECONDS, self._seconds):
                    self.interrupt(self.reason or _SILENT)

    def interrupt(self, reason: str) -> None:
        self.interrupted = True
        self.reason = reason
        self._moved.set()

    def fail(self, index: int, reason: str, error: type[PublishFailed] = PublishFailed) -> None:
        message = self.messages[index]
        identity = message_id(message.job_id, message.dispatch)
        self._outcomes[index] = error(f"message {identity} was not stored in stream {self._stream}: {reason}")

    def settle(self, token: int, data: bytes) -> None:
        index = self.under_way.pop(token)
        try:
            ack: _PubAck = _validate(data)
        except ValidationError:  # a status without a body: nothing listens on the subject
            self.reason = f"stream {self._stream} does not listen"
        else:
            self._take(index, ack)
        if len(self.under_way) <= self._most:
            self._moved.set()

    def _take(self, index: int, ack: _PubAck) -> None:
        error = ack.get("error")
        if error is None:
            self._progress_at = self._clock()
            if ack.get("stream") == self._stream and "seq" in ack:
                self._outcomes[index] = ack
            else:
                self.fail(index, "it was stored by another stream", PublishRefused)
        elif error["code"] == _UNAVAILABLE and error.get("err_code") not in _FULL:
            self.reason = error.get("description", "JetStream is not available")
        elif error.get("err_code") == _IN_PROCESS:
            reason = "JetStream has it, but not a majority of the stream's servers"
            self.fail(index, reason, PublishRefused)
        else:
            reason = error.get("description", f"JetStream answered {error['code']}")
            self.fail(index, reason, PublishRefused)

    def outcomes(self, created: datetime | None) -> list[PublishOutcome]:
        for index in self.missing():
            self.fail(index, f"no acknowledgement within {self._seconds:g} s, {self.reason}")
        return [
            each
            if isinstance(each, PublishFailed)
            else Published(each["seq"], created, each.get("duplicate", False))
            for each in self._outcomes
            if each is not None
        ]
