"""What is reported of a run: events, and the processor's own hooks."""

import asyncio

from jsworker.core.clock import boottime
from jsworker.core.events import Events
from jsworker.ownership.transitions.settle import Settled
from jsworker.worker.pipeline.outcomes import (
    Failed,
    HandedBack,
    Interrupted,
    InvalidResult,
    Lost,
    Outcome,
    first_line,
    headline,
)
from jsworker.worker.pipeline.run import Run


def emit_end(
    events: Events, run: Run, outcome: Outcome, settled: Settled, raised: BaseException | None
) -> None:
    """Emit what became of the job of a run; ``raised`` is the error behind its outcome."""
    error = first_line(outcome.error) if isinstance(outcome, Failed | Interrupted) else None
    if settled is Settled.COMPLETED and error is None and not events.wants("job.completed"):
        return
    facts = run.facts() | {"seconds": boottime() - run.claimed_at}
    if isinstance(outcome, Failed) and outcome.stalled and settled in {Settled.SCHEDULED, Settled.FAILED}:
        events.emit("job.stalled", **run.facts(), cause="crashed in quarantine", counted=True)
    match settled:
        case Settled.COMPLETED:
            if error is not None:
                events.emit("job.error", raised, **run.facts(), error=f"after its completion: {error}")
            events.emit("job.completed", **facts)
        case Settled.SCHEDULED:
            events.emit("job.error", raised, **facts, error=error)
        case Settled.FAILED:
            events.emit("job.failed", raised, **facts, error=error or run.refusal)
        case Settled.CANCELLED:
            events.emit("job.cancelled", **facts)
        case Settled.QUEUED:
            reason = outcome.reason if isinstance(outcome, HandedBack | Interrupted) else None
            events.emit("job.released", **facts, reason=reason)
        case Settled.LOST:
            events.emit("job.lost", **facts, late_write=not isinstance(outcome, Lost))
        case Settled.REFUSED:
            events.emit("job.lost", **facts, reason="PostgreSQL refused to write its outcome")


def emit_ignored_stop(events: Events, run: Run) -> None:
    """Emit that a run goes on although it was stopped."""
    events.emit(
        "job.stop_ignored",
        **run.facts(),
        stop=run.stop_in_words,
        cancellations=run.cancellations if run.kind.is_async else 0,
        seconds=round(boottime() - (run.first_cancelled_at or run.claimed_at), 3),
    )


async def call_hooks(events: Events, run: Run, outcome: Outcome, error: BaseException | None) -> None:
    """Call the hook of the processor that the end of a run asks for; its error is reported, no more."""
    processor, job = run.kind.processor, run.job
    if job is None:
        return
    try:
        if run.settled is Settled.FAILED:
            if error is None and isinstance(outcome, Failed):
                error = InvalidResult(outcome.error)
            await processor.on_failed(
                job, error or RuntimeError(run.refusal or "the result could not be stored")
            )
        elif run.settled is Settled.LOST:
            await processor.on_lost(job)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as raised:  # noqa: BLE001 -- as above
        events.emit("job.error", raised, **run.facts(), error=f"in a hook: {headline(raised)}")
