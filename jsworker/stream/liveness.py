"""Whether a worker is still reachable through NATS: it answers questions on a subject of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

import nats.errors

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.connection import Connection
from jsworker.stream.nats_client import Client

SUBJECT: Final = "jsworker.worker."
"""With a worker's id appended: the subject on which it answers with ``WELL`` or ``REFUSED``."""
STACKS: Final = ".stack"
"""After that: where it returns all its stacks, or with a job's id as question that run's. No worker's id ends
like this, for each has a random end."""
WELL: Final = b"alive"
REFUSED: Final = b"alive, and JetStream stores no messages"
_LONGEST_SUBJECT: Final = 300
"""Characters; a worker's own is shorter. A row may name any owner, and for a line above 4,096 bytes the
server closes the connection."""


class Answer(Enum):
    """The outcome of asking a worker."""

    ALIVE = "alive"
    NO_RESPONDERS = "no responders"  # the server knows no listener: the worker is not connected
    UNKNOWN = "unknown"  # time-out, lost connection or missing permission: proves nothing


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a question; ``reason`` tells why no answer could come, in the server's words."""

    answer: Answer
    content: bytes = b""
    reason: str | None = None


class Witness:
    """Answers for one worker and asks about others.

    Its answer, ``says``, is a text for people: any answer proves life. ``read_stacks`` returns the worker's
    stacks for a question; without it such questions stay unanswered.
    """

    def __init__(
        self,
        connection: Connection,
        worker_id: str,
        read_stacks: Callable[[bytes], Awaitable[bytes]] | None = None,
    ) -> None:
        self.says = WELL
        self._read_stacks = read_stacks
        self._answering: set[asyncio.Task[None]] = set()
        self._connection = connection
        self._worker_id = worker_id
        self._listening: Client | None = None
        connection.lost_callbacks.append(self._forget)

    async def prove(self, seconds: float) -> bool:
        """Listen on the worker's subject; returns whether a question sent there was answered in time."""
        if not self._connection.connected:
            return False
        self._listen(self._connection.client)
        return await self.ask(self._worker_id, seconds) is Answer.ALIVE

    async def ask(self, worker_id: str, seconds: float) -> Answer:
        """Ask whether a worker is reachable, and wait for the answer for at most ``seconds``."""
        return (await ask(self._connection, SUBJECT + worker_id, seconds)).answer

    def _forget(self) -> None:
        self._listening = None  # the subscription is lost with the connection

    def _listen(self, client: Client) -> None:
        if self._listening is client:
            return

        def answer(_subject: str, reply: bytes, _content: bytes, _status: dict[str, str] | None) -> None:
            if reply:
                client.answer(reply, self.says)

        def answer_stacks(
            _subject: str, reply: bytes, question: bytes, _status: dict[str, str] | None
        ) -> None:
            if not reply or self._read_stacks is None:
                return
            if question in replies:
                replies[question].append(reply)
                return
            replies[question] = [reply]
            stacks = _send_stacks(client, replies, question, self._read_stacks)
            answering = asyncio.create_task(stacks, name="jsworker stacks")
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)

        replies: dict[bytes, list[bytes]] = {}  # by question: the reply subjects that wait for its answer
        self._listening = client
        client.open_inbox(SUBJECT + self._worker_id, answer)
        if self._read_stacks is not None:
            client.open_inbox(SUBJECT + self._worker_id + STACKS, answer_stacks)


async def ask_stacks(settings: Settings, worker_id: str, *, job_id: UUID | None, seconds: float) -> Reply:
    """Ask a worker for its stacks, or those of one job's run.

    Waits at most ``seconds`` for a connection, raises as it does, and waits as long for the answer.
    """
    connection = Connection(settings, events=Events(), name="jsworker stacks")
    await connection.connect(seconds)
    try:
        question = b"" if job_id is None else str(job_id).encode()
        return await ask(connection, SUBJECT + worker_id + STACKS, seconds, question)
    finally:
        await connection.close()


async def _send_stacks(
    client: Client,
    replies: dict[bytes, list[bytes]],
    question: bytes,
    read_stacks: Callable[[bytes], Awaitable[bytes]],
) -> None:
    content = b""  # sent after an error: silence would look like a blocked event loop
    try:
        content = await read_stacks(question)
    finally:
        for reply in replies.pop(question):
            client.answer(reply, content)


async def ask(connection: Connection, subject: str, seconds: float, question: bytes = b"") -> Reply:
    """Ask on a worker's subject and wait for an answer for at most ``seconds``; never raises."""
    if not connection.connected or len(subject) > _LONGEST_SUBJECT:
        return Reply(Answer.UNKNOWN)
    asking = connection.client.request(subject, question, timeout=seconds)
    try:
        answer = await connection.answered(subject, asking)
    except (StreamRefused, StreamUnavailable) as silenced:
        return Reply(Answer.UNKNOWN, reason=str(silenced))
    except nats.errors.NoRespondersError:
        return Reply(Answer.NO_RESPONDERS if connection.connected else Answer.UNKNOWN)
    except (nats.errors.Error, OSError):
        return Reply(Answer.UNKNOWN)
    return Reply(Answer.ALIVE, answer.data)
