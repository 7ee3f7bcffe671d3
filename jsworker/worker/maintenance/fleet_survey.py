"""What waits in the table and in the stream, asked now and then for metrics."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, StreamRefused, StreamUnavailable
from jsworker.ownership.queries.job_report import Backlog, Waiting, backlog
from jsworker.stream.api import ConsumerInfo
from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS, Fleet, KindQueue
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace

SURVEY_SECONDS: Final = 10.0

_LONGEST_REST_SECONDS: Final = 45.0
_FRESH_SECONDS: Final = 60.0
"""What is older is not shown: no figure is better than an old one."""


class FleetSurvey:
    """Asks both servers; a question that has become slow is asked less often."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._kinds = sorted(context.kinds)
        self._pace = ScanPace(longest_rest=_LONGEST_REST_SECONDS)
        self._found: Fleet | None = None
        self._found_at = 0.0

    @property
    def latest(self) -> Fleet | None:
        """What was found last; None: nothing within the last minute."""
        return self._found if boottime() - self._found_at < _FRESH_SECONDS else None

    async def step(self) -> None:
        """Ask once, unless PostgreSQL is silent; what is not answered is asked again the next time."""
        if not self._context.health.up or not self._pace.is_due:
            return
        try:
            with self._pace.timed():
                found = await backlog(self._context.database, self._kinds, most=MOST_KINDS)
        except (DatabaseUnavailable, DatabaseRefused):  # a slow count says nothing about the server's health
            return
        # At once, without the stream: its silence must not hide what the table says about it.
        self._found, self._found_at = _fleet(found, {}), boottime()
        self._found = _fleet(found, await self._consumer_states(found.kinds))

    async def _consumer_states(self, kinds: Iterable[str]) -> dict[str, ConsumerInfo]:
        states: dict[str, ConsumerInfo] = {}
        with suppress(StreamUnavailable):  # the next one would not answer either
            for kind in kinds:
                if not self._context.stream.connected:
                    break
                with suppress(StreamRefused):  # a kind without a worker so far
                    states[kind] = await self._context.stream.consumer_state(kind)
        return states


def _fleet(found: Backlog, states: Mapping[str, ConsumerInfo]) -> Fleet:
    kinds = found.kinds if found.others is None else found.kinds | {OTHER_KINDS: found.others}
    return Fleet(
        queues={kind: _queue(waiting, states.get(kind)) for kind, waiting in kinds.items()},
        outbox_jobs=sum(waiting.to_publish for waiting in kinds.values()),
        outbox_oldest_seconds=max(
            (waiting.to_publish_oldest_seconds for waiting in kinds.values()), default=0.0
        ),
        dead_messages=found.dead_messages,
        refused_rows=found.refused_rows,
    )


def _queue(waiting: Waiting, state: ConsumerInfo | None) -> KindQueue:
    return KindQueue(
        jobs=waiting.jobs,
        oldest_seconds=waiting.oldest_seconds,
        to_publish=waiting.to_publish,
        pending=None if state is None else state.num_pending,
        unacknowledged=None if state is None else state.num_ack_pending,
        held=waiting.held,
        held_oldest_seconds=waiting.held_oldest_seconds,
    )
