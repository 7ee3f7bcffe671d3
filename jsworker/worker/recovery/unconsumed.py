"""Messages that no consumer takes: no worker ever had their kind, or another program published them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, StreamRefused, StreamUnavailable
from jsworker.core.names import is_kind
from jsworker.ownership.transitions import republish
from jsworker.worker.context import WorkerContext

LOOK_SECONDS: Final = 600.0
"""Between two looks."""

_LEFT_SECONDS: Final = 3600.0
"""From the first sight of a subject without a consumer to its removal: its worker may be on its way."""
_WILDCARDS: Final = frozenset({"*", ">"})
"""A program published to such a subject; to remove its messages would be to remove those of every kind."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """When a subject was first seen without a consumer, by this process's clock and the stream's numbers."""

    at: float
    stream_created: datetime
    last_seq: int


class Unconsumed:
    """Removes messages that no consumer will ever take; the stream would keep them for ever.

    What is removed was stored before the subject was first seen without a consumer, at least an hour ago,
    while no job of its kind is queued. So no job waits for it: each entry into the queue has a message of its
    own. Should one lose it all the same, it is published again. Every worker does this; twice does no harm.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._seen: dict[str, _Seen] = {}
        self._refusal: str | None = None

    async def step(self) -> None:
        """Look once, and remove what was seen for long enough."""
        if not (self._context.health.up and self._context.stream.connected):
            return
        try:
            await self._look()
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
        except StreamUnavailable:
            return  # the next look asks again
        except StreamRefused as error:
            self._note(error)

    async def _look(self) -> None:
        state = await self._context.stream.state()
        without = await self._context.stream.unconsumed()
        now = boottime()
        known = {kind: seen for kind, seen in self._seen.items() if seen.stream_created == state.created}
        self._seen = {kind: known.get(kind) or _Seen(now, state.created, state.last_seq) for kind in without}
        due = [
            kind
            for kind, seen in self._seen.items()
            if now - seen.at >= _LEFT_SECONDS and kind not in _WILDCARDS
        ]
        waiting = await self._waiting(due)
        removed = [kind for kind in due if kind not in waiting and await self._remove(kind)]
        if removed:
            left = await self._context.stream.unconsumed()
            for kind in removed:
                self._report(kind, without[kind], left.get(kind, 0))

    async def _waiting(self, kinds: Sequence[str]) -> set[str]:
        """Return the kinds with a queued job; only what a kind may be called is asked for."""
        names = [kind for kind in kinds if is_kind(kind)]
        return await republish.queued_kinds(self._context.database, kinds=names) if names else set()

    async def _remove(self, kind: str) -> bool:
        try:
            await self._context.stream.remove(kind, up_to=self._seen[kind].last_seq)
        except StreamRefused as error:  # others may be removed all the same
            self._note(error)
            return False
        del self._seen[kind]
        return True

    def _note(self, error: StreamRefused) -> None:
        if (refusal := str(error)) != self._refusal:
            self._refusal = refusal
            self._context.events.emit(
                "worker.degraded", what="removal of messages that no consumer takes", reason=refusal
            )

    def _report(self, kind: str, was: int, now: int) -> None:
        subject = self._context.stream.subject_of(kind)
        what = f"messages of {subject}, which no consumer takes and no job waits for"
        self._context.events.emit(
            "stream.changed", **{"what": what, "setting": "messages", "was": was, "is": now}
        )
