"""Messages that nobody can use: first kept in the database for people, then terminated."""

from collections.abc import Callable, Sequence

from jsworker.batcher import Batcher
from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.dead_messages import bury
from jsworker.ownership.refusals import RowRefused
from jsworker.runtime.health import DatabaseHealth
from jsworker.stream.delivery import Delivery, Undecodable

_DATABASE_DELAY = 5.0

_Letter = tuple[Delivery | Undecodable, str]


class DeadLetters:
    """Buries messages one after another; one that could not be kept is delivered again."""

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
        self._letters: Batcher[_Letter, None] = Batcher("dead letters", self._bury, limit=100, died=died)

    def bury(self, message: Delivery | Undecodable, reason: str) -> None:
        """Keep a message with the rule it breaks, then terminate it."""
        self._letters.post((message, reason))

    async def flush(self) -> None:
        """Wait until every message given so far is buried or put back."""
        await self._letters.flush()

    async def close(self) -> None:
        """Leave what is not buried yet to a later delivery."""
        await self._letters.close()

    async def _bury(self, letters: Sequence[_Letter]) -> Sequence[None]:
        for message, reason in letters:
            if not self._health.up:  # else each of them would wait out its own time-out
                message.nak(_DATABASE_DELAY)
                continue
            try:
                await bury(
                    self._database,
                    subject=message.subject,
                    stream_seq=message.stream_seq,
                    stored_at=message.stored_at,
                    reason=reason,
                    data=message.data,
                )
            except RowRefused as error:  # not kept, and told instead: it would come back for ever
                self._end(message, f"{reason}; not kept: {error}")
            except (DatabaseUnavailable, DatabaseRefused) as error:
                self._health.failed(error)
                message.nak(_DATABASE_DELAY)
            else:
                self._end(message, reason)
        return [None] * len(letters)

    def _end(self, message: Delivery | Undecodable, reason: str) -> None:
        message.term()
        self._events.emit(
            "message.dead", subject=message.subject, stream_seq=message.stream_seq, reason=reason
        )
