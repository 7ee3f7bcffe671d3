"""The spans of this worker's runs, and the note in the row by which a later run finds an earlier one."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from jsworker.core import tracing
from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.tracing import TraceContext
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.ownership.transitions.run_spans import RunContext, note_runs
from jsworker.ownership.transitions.settle import Settled
from jsworker.stream.wire import subject_of
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.outcomes import Failed, Outcome
from jsworker.worker.pipeline.run import Run

if TYPE_CHECKING:
    from jsworker.core.spans import RunSpans, Spans

_BATCH: Final = 500


class RunTracing:
    """Traces runs, if the application has set up OpenTelemetry; else it does nothing."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._notes: Batcher[RunContext, None] = Batcher(
            "run contexts", self._write, limit=_BATCH, died=context.died
        )
        self._noting: dict[Held, asyncio.Future[None]] = {}

    def begin(self, run: Run) -> None:
        """Begin the span of a run that has got its slot."""
        spans = tracing.active()
        if spans is not None:
            run.spans = tracing.attempt(partial(self._begin, run, spans))

    def _begin(self, run: Run, spans: "Spans") -> "RunSpans":
        claimed = run.claimed
        now_ns, now = time.time_ns(), boottime()
        begun = spans.run(
            subject_of(self._context.settings.subject_prefix, run.kind.name),
            claimed.id,
            TraceContext(claimed.traceparent, claimed.tracestate),
            {
                "messaging.consumer.group.name": run.kind.name,
                "jsworker.worker_id": self._context.worker_id,
                "jsworker.fencing_token": claimed.fencing_token,
                "jsworker.attempt": claimed.attempt,
                "jsworker.cleared": claimed.cleared,
            },
            claim_began_ns=now_ns - _nanoseconds(now - run.beaten_at),
            claimed_ns=now_ns - _nanoseconds(now - run.claimed_at),
        )
        if (state := begun.state()) is not None:
            noted = self._notes.submit(RunContext(claimed.id, claimed.fencing_token, state))
            self._noting[run.held] = noted
            noted.add_done_callback(lambda _: self._noting.pop(run.held, None))
        return begun

    async def noted(self, run: Run) -> None:
        """Wait until the context of a run is in its row, or cannot be written.

        A run that settled first would leave its follower the link to an earlier one.
        """
        if (noting := self._noting.get(run.held)) is not None:
            await asyncio.wait({noting})

    def processed(self, run: Run, outcome: Outcome, error: BaseException | None) -> None:
        """End the span of a run that has an outcome."""
        if run.spans is not None:
            shown = error if isinstance(outcome, Failed) else None
            tracing.attempt(partial(run.spans.processed, shown))

    def settled(self, run: Run, settled: Settled) -> None:
        """Tell what became of the job of a run."""
        if run.spans is not None:
            tracing.attempt(partial(run.spans.settled, settled.value))

    async def close(self) -> None:
        """Give up notes that are not written."""
        await self._notes.close()

    async def _write(self, runs: Sequence[RunContext]) -> Sequence[None]:
        if self._context.health.up:
            try:
                await note_runs(self._context.database, worker_id=self._context.worker_id, runs=runs)
            except DatabaseUnavailable as error:
                self._context.health.failed(error)
            except DatabaseRefused:  # a later run lacks its link, no more
                pass
        return [None] * len(runs)


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
