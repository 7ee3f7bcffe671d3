"""Whether a worker is still reachable through NATS: it answers on a subject of its own, others ask there."""

import asyncio
from enum import Enum
from typing import Final

import nats.errors

from jsworker.errors import StreamUnavailable
from jsworker.stream.client import Client
from jsworker.stream.connection import Connection

SUBJECT: Final = "jsworker.worker."
"""Followed by a worker's id: where it answers."""

WELL: Final = b"alive"
REFUSED: Final = b"alive, and JetStream stores no messages"
"""What a worker answers."""


class Answer(Enum):
    """What was heard of a worker."""

    ALIVE = "alive"
    NO_RESPONDERS = "no responders"
    """The server knows of nobody who listens there: the worker has no connection."""
    UNKNOWN = "unknown"
    """A time-out, a lost connection, a missing permission: says nothing about the worker."""


class Witness:
    """Answers for one worker and asks after others.

    Args:
        connection: the worker's connection to NATS.
        worker_id: who it answers for.

    Attributes:
        says: the answer: that it is there counts, the words are for people.
    """

    def __init__(self, connection: Connection, *, worker_id: str) -> None:
        self.says = WELL
        self._connection = connection
        self._subject = SUBJECT + worker_id
        self._listening: Client | None = None

    async def prove(self, seconds: float) -> bool:
        """Listen on the worker's subject and tell whether a question sent there was answered.

        Args:
            seconds: how long to wait for the answer.
        """
        try:
            await self._listen()
        except (StreamUnavailable, nats.errors.Error, OSError):
            return False
        return await self._ask(self._subject, seconds) is Answer.ALIVE

    async def ask(self, worker_id: str, seconds: float) -> Answer:
        """Ask whether a worker is reachable, and wait for the answer for at most ``seconds``."""
        return await self._ask(SUBJECT + worker_id, seconds)

    def forget(self) -> None:
        """Note that the connection was lost, and the subscription with it."""
        self._listening = None

    async def _listen(self) -> None:
        client = self._connection.client
        if self._listening is client or not self._connection.connected:
            return

        def answer(_subject: str, reply: bytes, _content: bytes, _status: dict[str, str] | None) -> None:
            if reply:
                client.answer(reply, self.says)

        self._listening = client  # before it is waited for: a connection that is lost meanwhile is forgotten
        try:
            await client.open_inbox(self._subject, answer)
        except BaseException:
            self._listening = None
            raise

    async def _ask(self, subject: str, seconds: float) -> Answer:
        if not self._connection.connected:
            return Answer.UNKNOWN
        asking = asyncio.create_task(self._request(subject, seconds), name=f"ask {subject}")
        try:
            with self._connection.hindrance_of(subject) as hindrance:
                either: set[asyncio.Future[Answer] | asyncio.Future[str | None]] = {asking, hindrance}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if hindrance.done():  # no permission, or the connection broke: both look like silence
                    return Answer.UNKNOWN
            return asking.result()
        finally:
            asking.cancel()

    async def _request(self, subject: str, seconds: float) -> Answer:
        try:
            await self._connection.client.request(subject, b"", timeout=seconds)
        except nats.errors.NoRespondersError:
            return Answer.NO_RESPONDERS if self._connection.connected else Answer.UNKNOWN
        except (StreamUnavailable, nats.errors.Error, OSError, TimeoutError):
            return Answer.UNKNOWN
        return Answer.ALIVE
