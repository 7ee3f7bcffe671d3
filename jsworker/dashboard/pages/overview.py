"""Overview: waiting, running and failed jobs of each kind, their rates, and the workers."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from markupsafe import Markup

from jsworker.dashboard.charts import Series, time_chart
from jsworker.dashboard.visit import Visit
from jsworker.ownership.queries.status import BOUND, Status, read_status
from jsworker.ownership.queries.work_figures import figures_by_minute, percentile
from jsworker.ownership.transitions.statistics import KindFigures

_KINDS: Final = 100
_MINUTES: Final = 60
_OLD_SECONDS: Final = 60.0
"""Longer waits than this are highlighted."""


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return the state of kinds and workers, and charts of the last hour."""
    status = await read_status(visit.site.reads, limit=_KINDS, after=visit.get("after"))
    figures = await figures_by_minute(visit.site.reads, minutes=_MINUTES)
    return {
        "status": status,
        "bound": BOUND,
        "sums": _sums(status),
        "is_old": _OLD_SECONDS,
        "charts": charts(figures, visit.site.clock.now()),
    }


def _sums(status: Status) -> Mapping[str, Any]:
    """Return the figures of all kinds on the page together: sums, and the longest of their waits."""
    waits = [kind.oldest_seconds for kind in status.kinds if kind.oldest_seconds is not None]
    held = [group for kind in status.kinds for group in kind.held.items()]
    return {
        "queued": sum(kind.queued for kind in status.kinds),
        "running": sum(kind.running for kind in status.kinds),
        "scheduled": sum(kind.scheduled for kind in status.kinds),
        "failed": sum(kind.failed for kind in status.kinds),
        "completed": sum(kind.per_minute["completed"] for kind in status.kinds),
        "oldest": max(waits, default=None),
        "held": {
            reason: sum(group.jobs for why, group in held if why == reason)
            for reason in ("limit", "rate", "paused", "needs")
            if any(why == reason for why, _ in held)
        },
    }


def charts(figures: Mapping[datetime, KindFigures], now: datetime) -> list[Markup]:
    """Return charts of the last hour: what ended, how long jobs waited, and how long they ran."""
    last = now.replace(second=0, microsecond=0)
    times = [last - timedelta(minutes=ago) for ago in reversed(range(1, _MINUTES + 1))]
    found = [figures.get(time) or KindFigures() for time in times]
    ended = [
        Series("completed", [each.completed for each in found], "look-completed"),
        Series("failed attempts", [each.errors for each in found], "look-queued"),
        Series("failed for good", [each.failed for each in found], "look-failed"),
        # A job that is cancelled while it waits has no worker that would count it.
        Series(
            "cancelled while running, or expired",
            [each.cancelled + each.expired for each in found],
            "look-cancelled",
        ),
    ]
    return [
        time_chart("Ended per minute", times, ended, form="bars"),
        time_chart("Wait for a worker", times, _percentiles([each.waits for each in found]), unit="s"),
        time_chart("Duration of runs", times, _percentiles([each.runs for each in found]), unit="s"),
    ]


def _percentiles(buckets: Sequence[Sequence[int]]) -> list[Series]:
    return [
        Series(name, [percentile(each, share) for each in buckets], look)
        for name, share, look in (("median", 0.5, "series-1"), ("p95", 0.95, "series-2"))
    ]
