"""A worker's status, from what it knows at this moment; nothing is asked."""

from collections import Counter
from typing import Final

from jsworker.core.clock import boottime
from jsworker.telemetry.worker_status import PoolUse, Readiness, WorkerStatus
from jsworker.worker.components import Components
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.run import InFlight
from jsworker.worker.watchdog import Watchdog

_NAMED: Final = 5
"""Kinds or jobs that are named; there may be hundreds."""


def check_up(context: WorkerContext, components: Components, *, draining: bool) -> WorkerStatus:
    """Return the status of a worker that has started; ``draining``: whether it is to stop."""
    not_pulled = [puller.kind for puller in components.pipeline.pullers if not puller.is_pulling]
    readiness = Readiness(
        postgresql=context.health.up,
        nats=context.stream.connected,
        migration=components.database_watch.revision,
        pulling=not not_pulled and not draining,
        draining=draining,
        ailing=[*_in_words(not_pulled), *_ignoring(context.in_flight), *_blocked(components.watchdog)],
        misfit=components.database_watch.misfit,
        publishing=not context.publishing.refused,
    )
    return WorkerStatus(
        readiness=readiness,
        in_flight=_in_flight(context),
        heartbeat_lag=boottime() - components.heartbeat.heard_at,
        event_loop_lag=components.lag.seconds,
        pools={
            name: PoolUse(pool.in_use, pool.limit) for name, pool in context.database.pools_by_name().items()
        },
        recovers_by=context.settings.recovers_by(),
    )


def _in_words(not_pulled: list[str]) -> list[str]:
    named = ", ".join(not_pulled[:_NAMED])
    more = f" and {len(not_pulled) - _NAMED} more" if len(not_pulled) > _NAMED else ""
    return [f"not pulled: {named}{more}"] if not_pulled else []


def _ignoring(in_flight: InFlight) -> list[str]:
    runs = [*in_flight.runs.values(), *in_flight.given_up]
    ignoring = [f"job {run.id}" for run in runs if run.ignores_stop]
    named = ", ".join(ignoring[:_NAMED])
    more = f" and {len(ignoring) - _NAMED} more" if len(ignoring) > _NAMED else ""
    return [f"told to stop and still running: {named}{more}"] if ignoring else []


def _blocked(watchdog: Watchdog) -> list[str]:
    seconds = watchdog.blocked_seconds
    return [f"its event loop has not come round for {seconds:.0f} s"] if seconds else []


def _in_flight(context: WorkerContext) -> dict[str, int]:
    # A list at once: figures may be collected in another thread.
    running = Counter(run.kind.name for run in list(context.in_flight.runs.values()))
    return {kind: running[kind] for kind in context.kinds}
