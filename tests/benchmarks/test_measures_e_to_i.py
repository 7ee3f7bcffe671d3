"""Short real runs of the measures e to i, and of what they are made of."""

import asyncio
import os
import time
from collections.abc import Sequence
from uuid import uuid4

import psutil
import psycopg
import pytest

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures import costs, growth, heartbeats, memory, pgbouncer
from benchmarks.measures.cpu_time import cpu_seconds
from benchmarks.measures.filling import fill_finished, fill_queued
from benchmarks.measures.load import backlog_rate, p50_and_p99, paced_latencies, publish_all
from benchmarks.measures.statements import logged_statements, read_jobs_table, read_server
from benchmarks.servers import Servers
from jsworker import JobClient
from jsworker.core.settings import load_settings

pytestmark = pytest.mark.slow


def ignore(_: str) -> None:
    """Show nothing."""


def value(figures: Sequence[Figure], ending: str) -> float:
    """Return the value of the one figure of one round whose name ends so."""
    (figure,) = [figure for figure in figures if figure.name.endswith(ending)]
    (only,) = figure.values
    return only


class TestPieces:
    def test_the_log_tells_statements_by_their_names(self, bench: Servers) -> None:
        variables = bench.new_jsworker()

        async def enqueue() -> None:
            names = {name.removeprefix("JSWORKER_").lower(): found for name, found in variables.items()}
            async with JobClient(load_settings(**names)) as client:
                for _ in range(3):
                    await client.enqueue("count", {})
                await client.enqueue_many("count", [{}, {}], unique_keys=["a", "b"])

        with logged_statements(bench.postgres) as log:
            asyncio.run(enqueue())
        assert log.times("ENQUEUE") == 3
        assert log.times("ENQUEUE_MANY") == 1
        assert log.times("ENQUEUE", "ENQUEUE_MANY") == 4
        assert log.by_name["ENQUEUE"].mean_milliseconds > 0
        assert "ENQUEUE 3 × " in log.told()

    def test_nothing_is_logged_afterwards(self, bench: Servers) -> None:
        with logged_statements(bench.postgres):
            pass
        size = bench.postgres.log.stat().st_size
        with psycopg.connect(bench.postgres.url) as connection:
            connection.execute("SELECT 1")
        assert b"SELECT 1" not in bench.postgres.log.read_bytes()[size:]

    def test_full_tables(self, bench: Servers) -> None:
        url = bench.new_jsworker()["JSWORKER_DATABASE_URL"]
        fill_finished(url, 700, kinds=["old"], show=ignore)
        fill_queued(url, 300, kind="new", show=ignore)
        with psycopg.connect(url) as connection:
            rows = connection.execute(
                "SELECT kind, status, count(*), count(*) FILTER (WHERE needs_publish),"
                " max(finished_at) - min(finished_at) > '6 days' FROM jsworker.jobs GROUP BY 1, 2 ORDER BY 1"
            ).fetchall()
        assert rows == [("new", "queued", 300, 300, None), ("old", "completed", 700, 0, True)]

    def test_cpu_time_counts_children_that_have_ended(self) -> None:
        before = cpu_seconds(os.getpid())
        with psutil.Popen(["python3", "-c", "sum(range(8_000_000))"]) as child:
            child.wait()
        assert cpu_seconds(os.getpid()) - before >= 0.05

    def test_counters_of_a_database(self, bench: Servers) -> None:
        url = bench.new_jsworker()["JSWORKER_DATABASE_URL"]
        before = read_server(bench.postgres, url)
        fill_finished(url, 10, kinds=["old"], show=ignore)
        deadline = time.monotonic() + 10
        while read_server(bench.postgres, url).commits - before.commits < 2:
            assert time.monotonic() < deadline
        assert read_server(bench.postgres, url).wal_bytes > before.wal_bytes
        assert read_jobs_table(url).index_megabytes > 0

    def test_rate_and_latency(self, bench: Servers) -> None:
        variables = bench.new_jsworker()
        assert backlog_rate(variables, 300) > 0
        latencies = paced_latencies(variables, per_second=50, seconds=1)
        assert len(latencies) == 50
        assert min(latencies) > 0

    def test_an_outbox_is_published_to_the_end(self, bench: Servers) -> None:
        variables = bench.new_jsworker()
        url = variables["JSWORKER_DATABASE_URL"]
        fill_queued(url, 1500, kind="noop", show=ignore)
        asyncio.run(publish_all(variables))
        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish").fetchone()
        assert rows == (1500,)

    def test_percentiles(self) -> None:
        assert p50_and_p99([float(n) for n in range(101)]) == (50.0, 99.0)


def test_heartbeats() -> None:
    figures = heartbeats.measure(1, ignore, jobs=40, seconds=6.0, logged_intervals=1)
    assert 1.9 <= value(figures, "heartbeat statements per interval") <= 6
    assert value(figures, "HOT share") > 0
    assert value(figures, "statements of any kind per second") > 0


@pytest.mark.timeout(240)
def test_growth() -> None:
    figures = growth.measure(
        1,
        ignore,
        finished=(200,),
        backlog=600,
        backlog_seconds=2.0,
        jobs=300,
        latency_seconds=0.5,
        pinned_seconds=3.0,
        pinned_per_second=100,
    )
    assert value(figures, "no-op jobs, 200 finished rows ÷ empty table") > 0
    assert value(figures, "no-op jobs, 600 queued jobs ÷ short queue") > 0
    assert value(figures, "at 100 jobs/s ÷ not pinned") > 0
    assert value(figures, "last minute: completed") > 0
    assert value(figures, "last minute: DUE, mean") > 0


def test_costs() -> None:
    figures = costs.measure(1, ignore, jobs=300, paced_seconds=1.0, logged_jobs=100)
    assert {figure.system for figure in figures} == {JSWORKER}
    for load in ("backlog of 300", "200 jobs/s, with enqueue"):
        costs_of_a_job = {
            figure.name.removeprefix(f"{load}: "): figure
            for figure in figures
            if figure.name.startswith(load)
        }
        assert costs_of_a_job["messages to NATS"].median >= 1
        assert costs_of_a_job["WAL"].median > 100
        assert "CLAIM" in costs_of_a_job["statements"].note
    assert value(figures, "200 jobs/s, with enqueue: statements") >= 2


def test_memory() -> None:
    figures = memory.measure(1, ignore, running_jobs=20, starts=1, settle_seconds=0.1)
    assert value(figures, "idle worker: USS") < value(figures, "idle worker: PSS")
    assert value(figures, "idle worker: PSS") < value(figures, "idle worker: RSS")
    assert value(figures, "supervisor: RSS") > 5
    assert value(figures, "--help: CPU time") > value(figures, "an empty Python program: CPU time")


class TestPgBouncer:
    def test_behind_it_and_without_it(self) -> None:
        figures = pgbouncer.measure(1, ignore, jobs=300, latency_seconds=0.5)
        assert {figure.system for figure in figures if figure.values} == {JSWORKER, pgbouncer.POOLED}
        assert len(figures) == 6

    def test_a_missing_program_is_a_failed_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", f"/nowhere-{uuid4()}")
        monkeypatch.setattr(pgbouncer, "_PLACES", ())
        figures = pgbouncer.measure(1, ignore, jobs=300, latency_seconds=0.5)
        (failed,) = [figure for figure in figures if not figure.values]
        assert failed.system == pgbouncer.POOLED
        assert failed.note == "failed: PgBouncer is not installed: apt-get install pgbouncer"
        assert {figure.system for figure in figures if figure.values} == {JSWORKER}
