"""Messages that no worker can use: first kept in the database for people, then terminated."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.transitions.dead_messages import Letter, keep
from jsworker.stream.message import Delivery, Undecodable
from jsworker.worker.context import WorkerContext

_BATCH: Final = 100
_DATABASE_DELAY: Final = 5.0
_REFUSED_DELAY: Final = 60.0
_REPORT_SECONDS: Final = 1.0
"""Between two events: a flood of messages must not become a flood of log lines."""

_COMPLAIN_SECONDS: Final = 60.0

_Message = Delivery | Undecodable


class DeadLetters:
    """Keeps messages in batches; one that could not be kept is delivered again."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._unanswered: set[_Message] = set()
        self._unreported = 0
        self._latest: Letter | None = None
        self._reporting: asyncio.TimerHandle | None = None
        self._complained_at: float | None = None
        self._letters: Batcher[tuple[_Message, str], None] = Batcher(
            "dead letters", self._keep, limit=_BATCH, died=context.died
        )

    def keep(self, message: _Message, reason: str, answered: Callable[[], None]) -> None:
        """Keep a message with the rule it breaks, then terminate it.

        ``answered`` is called once it has been terminated, or put back because it could not be kept.
        """
        self._unanswered.add(message)
        self._letters.post((message, reason), lambda _: answered())

    async def close(self, seconds: float) -> None:
        """Wait until every message given so far is kept, for at most ``seconds``; put back the others."""
        try:
            async with asyncio.timeout(seconds):
                await self._letters.flush()
        except TimeoutError:
            pass
        await self._letters.close()
        for message in self._unanswered:
            message.nak()
        self._unanswered.clear()
        if self._reporting is not None:
            self._reporting.cancel()
        self._report()

    async def _keep(self, batch: Sequence[tuple[_Message, str]]) -> Sequence[None]:
        letters = {
            Letter(message.subject, message.stream_seq, message.stored_at, reason, message.data): message
            for message, reason in batch
        }
        if self._context.health.up:  # else each batch would wait out its own time-out
            await self._write(letters)
        for message in letters.values():
            message.nak(_DATABASE_DELAY)
        self._unanswered.difference_update(letters.values())
        return [None] * len(batch)

    async def _write(self, letters: dict[Letter, _Message]) -> None:
        """Keep and terminate what PostgreSQL takes; what is left without an answer was not kept."""
        try:
            _, refused = await keep(self._context.database, list(letters))
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if isinstance(error, DatabaseRefused) and error.sqlstate is not None:
                self._complain(str(error))  # of this statement: the others may go on
            else:
                self._context.health.failed(error)
            return
        for letter, _ in refused:
            letters[letter].nak(_REFUSED_DELAY)
            self._complain(f"PostgreSQL refuses to keep message {letter.stream_seq} on {letter.subject}")
        for letter, message in letters.items():
            if not message.answered:
                message.term()
                self._unreported += 1
                self._latest = letter
        if self._reporting is None:
            self._report()

    def _report(self) -> None:
        """Report what was kept since the last time; what comes within a second is reported together."""
        self._reporting = None
        if self._latest is not None:
            self._context.events.emit(
                "message.dead",
                messages=self._unreported,
                subject=self._latest.subject,
                stream_seq=self._latest.stream_seq,
                reason=self._latest.reason,
            )
            self._unreported, self._latest = 0, None
            self._reporting = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._report)

    def _complain(self, reason: str) -> None:
        now = boottime()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_SECONDS:
            self._complained_at = now
            self._context.events.emit("worker.degraded", what="dead messages", reason=reason)
