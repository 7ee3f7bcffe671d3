"""The reports of a run: events, hooks and spans, and the note by which a later run links to this one."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from jsworker.core import tracing
from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.core.tracing import TraceContext
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.settle import Settled
from jsworker.ownership.transitions.timeline import RunContext, note_error_after_completion, note_runs
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline import outcomes
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.kinds import call_hook
from jsworker.worker.pipeline.outcomes import (
    Completed,
    Failed,
    HandedBack,
    Interrupted,
    Lost,
    Outcome,
    Snoozed,
)

if TYPE_CHECKING:
    from jsworker.core.spans import RunSpans, Spans

_NOTES_AT_ONCE: Final = 500


def emit_end(
    events: Events, run: Run, outcome: Outcome, settled: Settled, raised: BaseException | None
) -> None:
    """Report what became of a run's job, in events and spans; ``raised`` is the error of the outcome."""
    if run.spans is not None:
        tracing.attempt(partial(run.spans.settled, settled.value))
    error = None if type(outcome) is Completed and run.refusal is None else _error_in(run, outcome, settled)
    if settled is Settled.COMPLETED and error is None and not events.wants("job.completed"):
        return
    facts = run.facts() | {"seconds": boottime() - run.claimed_at}
    if isinstance(outcome, Failed) and outcome.stalled and settled in {Settled.SCHEDULED, Settled.FAILED}:
        where = "quarantine" if run.quarantined else "isolation"
        events.emit("job.stalled", **run.facts(), cause=f"crashed in {where}", counted=True)
    match settled:
        case Settled.COMPLETED:
            if error is not None:
                events.emit("job.error", raised, **run.facts(), error=f"after its completion: {error}")
            events.emit("job.completed", **facts)
        case Settled.SCHEDULED:
            events.emit("job.error", raised, **facts, error=error)
        case Settled.FAILED:
            events.emit("job.failed", raised, **facts, error=error)
        case Settled.CANCELLED:
            events.emit("job.cancelled", **facts)
        case Settled.QUEUED:
            reason = outcome.reason if isinstance(outcome, HandedBack | Interrupted) else None
            fault = {"server_fault": True} if isinstance(outcome, Interrupted) else {}
            events.emit("job.released", **facts, reason=reason, **fault)
        case Settled.SNOOZED:
            waits = {"reason": outcome.reason, "after": outcome.after} if isinstance(outcome, Snoozed) else {}
            events.emit("job.snoozed", **facts, **waits)
        case Settled.LOST:
            events.emit("job.lost", **facts, late_write=not isinstance(outcome, Lost))
        case Settled.REFUSED:
            events.emit("job.lost", **facts, reason="PostgreSQL refused to write its outcome")


def _error_in(run: Run, outcome: Outcome, settled: Settled) -> str | None:
    match outcome:
        case Failed() | Interrupted():
            return outcomes.first_line(outcome.error)
        case Snoozed() if settled is Settled.COMPLETED:
            return f"it asked to run again: {outcome.reason}"
        case _:
            return run.refusal


async def note_error(context: WorkerContext, run: Run, outcome: Outcome, settled: Settled) -> None:
    """Write to the timeline the error of a run whose job is completed, unless the database is away."""
    if settled is not Settled.COMPLETED or isinstance(outcome, Completed) or not context.health.up:
        return
    error = outcome.error if isinstance(outcome, Failed | Interrupted) else _error_in(run, outcome, settled)
    if error is not None:
        with context.health.noting(), suppress(RowRefused):
            await note_error_after_completion(
                context.database, worker_id=context.worker_id, held=run.held, error=error
            )


def end_process_span(run: Run, outcome: Outcome, error: BaseException | None) -> None:
    """End the span of a run that has an outcome."""
    if run.spans is not None:
        shown = error or _error_of(run, outcome, Settled.FAILED) if isinstance(outcome, Failed) else None
        tracing.attempt(partial(run.spans.processed, shown))


def emit_ignored_stop(events: Events, run: Run) -> None:
    """Emit the event of a run that goes on although it was stopped."""
    events.emit(
        "job.stop_ignored",
        **run.facts(),
        stop=run.stop_in_words,
        cancellations=run.cancellations if run.kind.is_async else 0,
        seconds=round(boottime() - (run.first_cancelled_at or run.claimed_at), 3),
    )


async def call_hooks(
    events: Events, run: Run, outcome: Outcome, settled: Settled, error: BaseException | None
) -> None:
    """Call the processor's hook for the end of a run, if there is one; its error is only reported."""
    if run.job is None:
        return
    try:
        if settled is Settled.FAILED:
            if error is None or isinstance(outcome, Snoozed):  # a snooze is no error
                error = _error_of(run, outcome, settled)
            await call_hook(run.kind.processor.on_failed, run.job, error)
        elif settled is Settled.LOST:
            await call_hook(run.kind.processor.on_lost, run.job)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as raised:  # noqa: BLE001 -- the user's code; the job has ended
        emit_hook_error(events, run, raised)


def _error_of(run: Run, outcome: Outcome, settled: Settled) -> Exception:
    """Return an error with the first line of the outcome's text: nothing was raised in this process."""
    text = _error_in(run, outcome, settled) or "its outcome could not be stored"
    match outcome:
        case Failed(permanent="result"):
            return outcomes.InvalidResult(text)
        case Failed(permanent=None) if outcomes.passed_limit(run):
            return TimeoutError(text)
        case _:
            return RuntimeError(text)


def emit_hook_error(events: Events, run: Run, raised: BaseException) -> None:
    """Emit the error of a hook, which changes nothing else."""
    events.emit(
        "job.error", raised, **run.facts(), error=f"in a hook: {outcomes.shown_headline(run, raised)}"
    )


class RunTracing:
    """Traces runs if the application has set up OpenTelemetry."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._notes: Batcher[RunContext, None] = Batcher(
            "run contexts", self._write, limit=_NOTES_AT_ONCE, died=context.died
        )

    def begin(self, run: Run) -> None:
        """Begin the span of a run that has a slot now."""
        spans = tracing.active()
        if spans is not None:
            run.spans = tracing.attempt(partial(self._begin, run, spans))

    def _begin(self, run: Run, spans: "Spans") -> "RunSpans":
        claimed = run.claimed
        now_ns, now = time.time_ns(), boottime()
        begun = spans.run(
            self._context.stream.subject_of(run.kind.name),
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
            run.noting = self._notes.submit(RunContext(claimed.id, claimed.fencing_token, state))
        return begun

    async def close(self) -> None:
        """Give up unwritten notes."""
        await self._notes.close()

    async def _write(self, runs: Sequence[RunContext]) -> None:
        if self._context.health.up:
            try:
                await note_runs(self._context.database, worker_id=self._context.worker_id, runs=runs)
            except DatabaseUnavailable as error:
                self._context.health.failed(error)
            except DatabaseRefused:  # only the link of a later run is missing
                pass


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
