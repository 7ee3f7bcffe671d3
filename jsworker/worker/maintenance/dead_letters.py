"""Messages that nobody can use: first kept in the database for people, then terminated."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.dead_messages import Letter, keep
from jsworker.stream.message import Delivery, Undecodable
from jsworker.worker.health import DatabaseHealth

_BATCH: Final = 100
_DATABASE_DELAY: Final = 5.0
_REFUSED_DELAY: Final = 60.0
_TELL_SECONDS: Final = 1.0
"""Between two events: a flood of messages must not become a flood of log lines."""

_COMPLAIN_SECONDS: Final = 60.0

_Message = Delivery | Undecodable


class DeadLetters:
    """Buries messages in batches; one that could not be kept is delivered again."""

    def __init__(
        self,
        *,
        database: Database,
        health: DatabaseHealth,
        events: Events,
        died: Callable[[str, BaseException], None],
    ) -> None:
        self._database = database
        self._health = health
        self._events = events
        self._in_hand: set[_Message] = set()
        self._untold = 0
        self._latest: Letter | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._complained_at: float | None = None
        self._letters: Batcher[tuple[_Message, str], None] = Batcher(
            "dead letters", self._bury, limit=_BATCH, died=died
        )

    def bury(self, message: _Message, reason: str, answered: Callable[[], None]) -> None:
        """Keep a message with the rule it breaks, then terminate it.

        Args:
            message: what nobody can use.
            reason: the rule that it breaks.
            answered: called once it has been terminated, or put back because it could not be kept.
        """
        self._in_hand.add(message)
        self._letters.post((message, reason), lambda _: answered())

    @property
    def in_hand(self) -> int:
        """How many messages have not been answered yet."""
        return len(self._in_hand)

    async def close(self, seconds: float) -> None:
        """Wait until every message given so far is buried, for at most ``seconds``; put back the others."""
        try:
            async with asyncio.timeout(seconds):
                await self._letters.flush()
        except TimeoutError:
            pass
        await self._letters.close()
        for message in self._in_hand:
            message.nak()
        self._in_hand.clear()
        if self._telling is not None:
            self._telling.cancel()
        self._tell()

    async def _bury(self, batch: Sequence[tuple[_Message, str]]) -> Sequence[None]:
        letters = {
            Letter(message.subject, message.stream_seq, message.stored_at, reason, message.data): message
            for message, reason in batch
        }
        if self._health.up:  # else each batch would wait out its own time-out
            await self._keep(letters)
        for message in letters.values():
            message.nak(_DATABASE_DELAY)
        self._in_hand.difference_update(letters.values())
        return [None] * len(batch)

    async def _keep(self, letters: dict[Letter, _Message]) -> None:
        """Bury and terminate what PostgreSQL takes; what is left without an answer was not kept."""
        try:
            _, refused = await keep(self._database, list(letters))
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if isinstance(error, DatabaseRefused) and error.sqlstate is not None:
                self._complain(str(error))  # of this statement: the others may go on
            else:
                self._health.failed(error)
            return
        for letter, _ in refused:
            letters[letter].nak(_REFUSED_DELAY)
            self._complain(f"PostgreSQL refuses to keep message {letter.stream_seq} on {letter.subject}")
        for letter, message in letters.items():
            if not message.answered:
                message.term()
                self._untold += 1
                self._latest = letter
        if self._telling is None:
            self._tell()

    def _tell(self) -> None:
        """Tell of what was buried since the last time; what comes within the next second is told together."""
        self._telling = None
        if self._latest is not None:
            self._events.emit(
                "message.dead",
                messages=self._untold,
                subject=self._latest.subject,
                stream_seq=self._latest.stream_seq,
                reason=self._latest.reason,
            )
            self._untold, self._latest = 0, None
            self._telling = asyncio.get_running_loop().call_later(_TELL_SECONDS, self._tell)

    def _complain(self, reason: str) -> None:
        now = boottime()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_SECONDS:
            self._complained_at = now
            self._events.emit("worker.degraded", what="dead messages", reason=reason)
