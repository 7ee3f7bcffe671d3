"""The measures k to m, small: what passes is asserted, and never how fast."""

import psycopg
import pytest

from benchmarks.measures import flow_control, held_rows, pace
from benchmarks.measures.filling import fill_held_by_key, fill_held_by_needs
from benchmarks.measures.load import backlog_rate
from benchmarks.servers import Servers

pytestmark = pytest.mark.slow


def ignore(_: str) -> None:
    """Show nothing."""


@pytest.mark.timeout(240)
def test_each_load_is_measured_beside_plain_jobs() -> None:
    figures = flow_control.measure(1, ignore, jobs=200)
    rates = [figure for figure in figures if figure.unit == "jobs/s"]
    ratios = [figure for figure in figures if figure.unit == "×"]
    assert [figure.name for figure in ratios] == [f"{figure.name} ÷ plain" for figure in rates[1:]]
    assert all(figure.median > 0 for figure in figures)


def test_what_is_held_stays_held_beside_plain_jobs(bench: Servers) -> None:
    variables = bench.new_jsworker()
    url = variables["JSWORKER_DATABASE_URL"]
    fill_held_by_key(url, 300, kind="held", show=ignore)
    fill_held_by_needs(url, 300, kind="held", show=ignore)
    assert backlog_rate(variables, 300) > 0
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT held_by, count(*), count(DISTINCT batch_id) FROM jsworker.jobs"
            " WHERE status = 'scheduled' AND held_by IS NOT NULL GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert rows == [("needs", 300, 10), ("paused", 300, 0)]


@pytest.mark.timeout(240)
def test_tables_with_held_rows_are_compared_with_one_without() -> None:
    figures = held_rows.measure(1, ignore, rows=200, jobs=200, latency_seconds=0.5)
    for table in ("200 rows held by a key", "200 rows held by needs"):
        assert len([figure for figure in figures if figure.name.endswith(f"{table} ÷ no held rows")]) == 3
    assert all(figure.median > 0 for figure in figures)


def test_admissions_are_counted_by_seconds() -> None:
    figures = pace.measure(1, ignore, seconds=4, processes=2)
    first, fewest, most, *late = (figure.median for figure in figures)
    # By the rate no second can have more than its tokens and those that were left: 50 of the bucket, and 50.
    assert 0 < first <= 101
    assert fewest <= most <= 101
    assert all(milliseconds > -1 for milliseconds in late)  # no token before its time; stored in microseconds
