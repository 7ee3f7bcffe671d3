"""What a worker knows of itself at this moment; nobody is asked."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from jsworker.core.clock import boottime
from jsworker.telemetry.worker_status import PoolUse, Readiness, Vitals
from jsworker.worker.components import Parts
from jsworker.worker.watchdog import Watchdog

_NAMED: Final = 5
"""Kinds or jobs that are named; there may be hundreds."""


def check_up(parts: Parts, *, draining: bool, recovers_by: Mapping[str, bool]) -> Vitals:
    """Look at the parts of a worker that has started.

    Args:
        parts: everything that works in it.
        draining: whether it was told to stop.
        recovers_by: the rules of recovery, and whether each is on.
    """
    not_pulled = [puller.kind for puller in parts.pullers if not puller.is_pulling]
    readiness = Readiness(
        postgresql=parts.health.up,
        nats=parts.stream.connected,
        migration=parts.schema.revision,
        pulling=not not_pulled and not draining,
        draining=draining,
        ailing=[*_in_words(not_pulled), *_ignoring(parts), *_blocked(parts.watchdog)],
        misfit=parts.schema.misfit,
        publishing=not parts.publishing.refused,
    )
    return Vitals(
        readiness=readiness,
        in_flight=_in_flight(parts),
        heartbeat_lag=boottime() - parts.heartbeat.heard_at,
        event_loop_lag=parts.lag.seconds,
        pools={
            name: PoolUse(pool.in_use, pool.limit) for name, pool in parts.database.pools_by_name().items()
        },
        recovers_by=recovers_by,
    )


def _in_words(not_pulled: list[str]) -> list[str]:
    named = ", ".join(not_pulled[:_NAMED])
    more = f" and {len(not_pulled) - _NAMED} more" if len(not_pulled) > _NAMED else ""
    return [f"not pulled: {named}{more}"] if not_pulled else []


def _ignoring(parts: Parts) -> list[str]:
    runs = [*parts.hand.runs.values(), *parts.hand.given_up]
    ignoring = [f"job {run.id}" for run in runs if run.ignores_stop]
    named = ", ".join(ignoring[:_NAMED])
    more = f" and {len(ignoring) - _NAMED} more" if len(ignoring) > _NAMED else ""
    return [f"told to stop and still running: {named}{more}"] if ignoring else []


def _blocked(watchdog: Watchdog) -> list[str]:
    seconds = watchdog.blocked_seconds
    return [f"its event loop has not come round for {seconds:.0f} s"] if seconds else []


def _in_flight(parts: Parts) -> dict[str, int]:
    # A list at once: whoever collects figures may do so in another thread.
    running = Counter(run.kind.name for run in list(parts.hand.runs.values()))
    return {consumer.kind.name: running[consumer.kind.name] for consumer in parts.consumers}
