"""Messages that no worker can use: stored in the database for operators, then terminated."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from jsworker.core.batching import Batcher
from jsworker.ownership.transitions.dead_messages import NewDeadMessage, keep
from jsworker.stream.message import Delivery, Undecodable
from jsworker.worker.context import WorkerContext

_BATCH: Final = 100
_DATABASE_DELAY: Final = 5.0
_REFUSED_DELAY: Final = 60.0
_REPORT_SECONDS: Final = 1.0
"""The shortest time between two events, so that a flood of messages does not flood the log."""

_Message = Delivery | Undecodable
_Kept = tuple[str, int | None, str]


class DeadLetters:
    """Stores messages in batches; a message that could not be stored is delivered again."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._unanswered: set[_Message] = set()
        self._letters: Batcher[tuple[_Message, str], None] = Batcher(
            "dead letters", self._keep, limit=_BATCH, died=context.died
        )
        self._reports: Batcher[_Kept, None] = Batcher(
            "dead messages", self._report, limit=sys.maxsize, died=context.died
        )
        self._ending = asyncio.Event()

    def keep(self, message: _Message, reason: str, answered: Callable[[], None]) -> None:
        """Store a message with the rule that it breaks, then terminate it.

        ``answered`` is called once it has been terminated, or put back because it could not be stored.
        """
        self._unanswered.add(message)
        self._letters.post((message, reason), lambda _: answered())

    async def close(self, seconds: float) -> None:
        """Wait for at most ``seconds`` until the given messages are stored; put back the others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._letters.flush()
        await self._letters.close()
        for message in self._unanswered:
            message.nak()
        self._unanswered.clear()
        self._ending.set()
        await self._reports.flush()

    async def _keep(self, batch: Sequence[tuple[_Message, str]]) -> None:
        letters = {
            NewDeadMessage(
                message.subject, message.stream_seq, message.stored_at, reason, message.data
            ): message
            for message, reason in batch
        }
        if self._context.health.up:  # otherwise each batch would wait for its time-out
            with self._context.noting("dead messages"):
                _, refused = await keep(self._context.database, list(letters))
                self._answer(letters, [letter for letter, _ in refused])
        for message in letters.values():
            message.nak(_DATABASE_DELAY)
        self._unanswered.difference_update(letters.values())

    def _answer(self, letters: dict[NewDeadMessage, _Message], refused: Sequence[NewDeadMessage]) -> None:
        for letter in refused:
            letters[letter].nak(_REFUSED_DELAY)
        if refused:
            which = f"message {refused[0].stream_seq} on {refused[0].subject}"
            self._context.complaints.report("dead messages", f"PostgreSQL refuses to keep {which}")
        else:
            self._context.complaints.end("dead messages")
        for letter, message in letters.items():
            if not message.answered:
                message.term()
                self._reports.post((letter.subject, letter.stream_seq, letter.reason))

    async def _report(self, kept: Sequence[_Kept]) -> None:
        subject, stream_seq, reason = kept[-1]
        self._context.events.emit(
            "message.dead", messages=len(kept), subject=subject, stream_seq=stream_seq, reason=reason
        )
        with suppress(TimeoutError):  # messages that come meanwhile are reported together
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._ending.wait()
