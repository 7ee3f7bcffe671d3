"""Counts waiting jobs in the table and waiting messages in the stream, for metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, StreamRefused, StreamUnavailable
from jsworker.core.priorities import PRIORITIES, priority_number
from jsworker.ownership.queries.job_report import Backlog, Waiting, backlog
from jsworker.ownership.transitions.workflows import Left, left_undone
from jsworker.stream.api import ConsumerInfo, NotThere
from jsworker.stream.message import consumer_of, lane_of
from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS, Fleet, KindQueue
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace

SURVEY_SECONDS: Final = 10.0

_LONGEST_REST_SECONDS: Final = 45.0
_FRESH_SECONDS: Final = 60.0
"""Older figures are not shown: a missing figure is better than an old one."""


class FleetSurvey:
    """Asks both servers; a slow query is repeated less often."""

    def __init__(self, context: WorkerContext, open_lanes: Callable[[], Iterable[str]] = tuple) -> None:
        """Prepare; ``open_lanes`` returns this worker's consumers of other priorities than normal."""
        self._context = context
        self._open_lanes = open_lanes
        self._kinds = sorted(context.kinds)
        self._pace = ScanPace(longest_rest=_LONGEST_REST_SECONDS)
        self._lanes: dict[str, set[str]] = {}  # the priorities of which each kind has had jobs
        self._found: Fleet | None = None
        self._found_at = 0.0
        self._left_since: dict[UUID, float] = {}  # batches and workflows left undone, and since when

    @property
    def latest(self) -> Fleet | None:
        """The last result; None if there was none within the last minute."""
        return self._found if boottime() - self._found_at < _FRESH_SECONDS else None

    async def step(self) -> None:
        """Ask once, unless PostgreSQL does not answer; the next survey repeats unanswered queries."""
        if not self._context.health.up or not self._pace.is_due:
            return
        try:
            with self._pace.timed():
                found = await backlog(self._context.database, self._kinds, most=MOST_KINDS)
                left = await left_undone(self._context.database)
        except (DatabaseUnavailable, DatabaseRefused):  # a slow count says nothing about the server's health
            return
        self._note_lanes(found)
        left_seconds = self._left_seconds(left)
        # Publish this at once, without the stream: a silent stream must not hide what the table says.
        self._found, self._found_at = _fleet(found, {}, left_seconds), boottime()
        self._found = _fleet(found, await self._consumer_states(found.kinds), left_seconds)

    def _left_seconds(self, left: Left) -> float:
        """Return for how long the oldest work on workflows has been left undone, by the surveys so far.

        No row tells when the last job of a batch ended; in a busy installation some batch always just has.
        """
        present = boottime()
        ids = [*left.batches, *left.needs, *left.workflows, *left.cancelled]
        self._left_since = {each: self._left_since.get(each, present) for each in ids}
        return max((present - since for since in self._left_since.values()), default=0.0)

    def _note_lanes(self, found: Backlog) -> None:
        """Show a lane that had jobs as empty."""
        for kind, priority in map(lane_of, self._open_lanes()):
            self._lanes.setdefault(kind, set()).add(PRIORITIES[priority])
        for kind, waiting in found.kinds.items():
            seen = self._lanes.setdefault(kind, set())
            seen.update(waiting.lanes)
            waiting.lanes = {priority: waiting.lanes.get(priority, (0, 0.0)) for priority in sorted(seen)}

    async def _consumer_states(self, kinds: Iterable[str]) -> dict[str, list[ConsumerInfo]]:
        states: dict[str, list[ConsumerInfo]] = {}
        with suppress(StreamUnavailable):  # the next request would not be answered either
            for kind in kinds:
                if not self._context.stream.connected:
                    break
                with suppress(StreamRefused):  # a kind without a worker so far
                    states[kind] = [await self._context.stream.consumer_state(kind)]
                for priority in self._lanes.get(kind, ()):
                    with suppress(StreamRefused, NotThere):
                        consumer = consumer_of(kind, priority_number(priority))
                        of_lane = await self._context.stream.consumer_state(consumer)
                        states.setdefault(kind, []).append(of_lane)
        return states


def _fleet(found: Backlog, states: Mapping[str, Sequence[ConsumerInfo]], left_seconds: float) -> Fleet:
    kinds = found.kinds if found.others is None else found.kinds | {OTHER_KINDS: found.others}
    return Fleet(
        queues={kind: _queue(waiting, states.get(kind)) for kind, waiting in kinds.items()},
        outbox_jobs=sum(waiting.to_publish for waiting in kinds.values()),
        outbox_oldest_seconds=max(
            (waiting.to_publish_oldest_seconds for waiting in kinds.values()), default=0.0
        ),
        dead_messages=found.dead_messages,
        refused_rows=found.refused_rows,
        workflows_left_seconds=left_seconds,
    )


def _queue(waiting: Waiting, states: Sequence[ConsumerInfo] | None) -> KindQueue:
    if states is None:
        return KindQueue(waiting, None, None)
    pending = sum(each.num_pending or 0 for each in states)
    return KindQueue(waiting, pending, sum(each.num_ack_pending or 0 for each in states))
