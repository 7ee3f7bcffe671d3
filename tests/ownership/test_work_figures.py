"""Figures by the minute: what workers add up, and what is read of it."""

import pytest

from jsworker.core.clock import DURATION_BUCKETS
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.queries.work_figures import figures_by_minute, percentile
from jsworker.ownership.transitions.settle import Settled
from jsworker.ownership.transitions.statistics import add_statistics, forget_statistics
from jsworker.worker.figure_counts import FigureCounts

from .rows import Sql


async def test_two_workers_add_to_the_same_minute(database: Database, sql: Sql) -> None:
    for seconds in (0.02, 2.0):
        counts = FigureCounts(Events())
        for kind in ("b", "a"):
            counts.claimed(kind, 0.001)
            counts.ended(kind, Settled.COMPLETED, seconds)
        counts.ended("a", Settled.FAILED, 1e9)
        counts.ended("a", Settled.LOST, 5.0)
        await add_statistics(database, counts.take())
        assert counts.take() == {}
    sql.execute("UPDATE jsworker.statistics SET minute = date_trunc('minute', clock_timestamp())")
    [both] = (await figures_by_minute(database)).values()
    assert (both.started, both.completed, sum(both.runs)) == (4, 4, 6)
    rows = sql.execute(
        "SELECT kind, started, completed, failed, run_seconds, waits[1] AS waits"
        " FROM jsworker.statistics ORDER BY kind"
    ).fetchall()
    assert [tuple(row.values()) for row in rows] == [
        ("a", 2, 2, 2, pytest.approx(2.02 + 2e9), 2),
        ("b", 2, 2, 0, pytest.approx(2.02), 2),
    ]
    assert (both.runs[-1], len(both.runs)) == (2, len(DURATION_BUCKETS) + 1)


async def test_what_sweeps_end_is_counted_once(database: Database) -> None:
    events = Events()
    counts = FigureCounts(events)
    events.emit("job.failed", kind="a", seconds=1.0)  # of a run
    events.emit("job.failed", kind="a")
    events.emit("job.cancelled", kind="a")
    events.emit("jobs.expired", kind="a", jobs=3)
    [figures] = counts.take().values()
    assert (figures.failed, figures.cancelled, figures.expired, sum(figures.runs)) == (1, 1, 3, 0)
    counts.ended("a", Settled.SCHEDULED, 1.0)
    assert counts.take()["a"].errors == 1


async def test_those_of_another_version_have_other_buckets(database: Database, sql: Sql) -> None:
    counts = FigureCounts(Events())
    counts.claimed("a", 0.0)
    await add_statistics(database, counts.take())
    sql.execute(
        "UPDATE jsworker.statistics SET waits = '{1,1}', minute = date_trunc('minute', clock_timestamp())"
    )
    counts.claimed("a", 1e9)
    await add_statistics(database, counts.take())
    [figures] = (await figures_by_minute(database)).values()
    assert (figures.waits[:2], figures.waits[-1]) == ([1, 1], 1)


async def test_they_are_kept_for_two_days(database: Database, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.statistics (minute, kind, waits, runs)"
        " SELECT date_trunc('minute', clock_timestamp()) - n * interval '1 hour', 'a', '{}', '{}'"
        " FROM generate_series(1, 60) AS n"
    )
    await forget_statistics(database)
    assert sql.execute("SELECT FROM jsworker.statistics").rowcount == 47
    figures = await figures_by_minute(database, minutes=600)
    assert {(each.started, sum(each.waits)) for each in figures.values()} == {(0, 0)}


def test_percentiles_lie_within_their_buckets() -> None:
    buckets = [0] * (len(DURATION_BUCKETS) + 1)
    assert percentile(buckets, 0.5) is None
    buckets[2] = 10  # up to 25 ms
    assert percentile(buckets, 0.5) == pytest.approx(0.0175)
    assert percentile(buckets, 1.0) == DURATION_BUCKETS[2]
    buckets[-1] = 90
    assert percentile(buckets, 0.5) == DURATION_BUCKETS[-1]
