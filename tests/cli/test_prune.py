"""``prune``: what goes, what is only counted, and what remains when it is stopped half-way."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from jsworker.ownership.transitions import prune as pruning
from tests.ownership.rows import Sql, ago, insert_job, read_value, slow_rows

from .commands import Cli, Spawn, Terminal, wait_until

Holder = psycopg.Connection[tuple[Any, ...]]

DAY = 86_400.0
OLD_JOBS = """
INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), 'old', '{}', 'completed', 1, 1,
  clock_timestamp() - interval '9 days' + n * interval '1 ms', 1
FROM generate_series(1, %s) AS n
"""
OLD_WORKFLOWS = """
WITH flows AS (
  INSERT INTO jsworker.workflows (id, name, finished_at, outcome)
  SELECT uuidv7(), 'old', clock_timestamp() - interval '9 days', 'completed' FROM generate_series(1, %s)
  RETURNING *
), batches AS (
  INSERT INTO jsworker.batches (id, workflow, name, kind, place, finished_at, outcome, propagated)
  SELECT uuidv7(), id, 'only', 'old', 0, finished_at, outcome, true FROM flows RETURNING *
)
INSERT INTO jsworker.jobs
  (id, batch_id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), id, kind, '{}', 'completed', 1, 1, finished_at, 1 FROM batches
"""
TIMELINES = "INSERT INTO jsworker.job_events (job_id, event) SELECT id, 'released' FROM jsworker.jobs"
HOLD = """
CREATE FUNCTION jsworker.hold() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NULL; END $$
"""
HOLD_DELETES = """
CREATE TRIGGER hold AFTER DELETE ON jsworker.jobs FOR EACH STATEMENT EXECUTE FUNCTION jsworker.hold()
"""
HOLD_LATER = """
CREATE SEQUENCE jsworker.batches_deleted;
CREATE FUNCTION jsworker.hold() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN
  IF nextval('jsworker.batches_deleted') > 3 THEN PERFORM pg_advisory_xact_lock_shared(42); END IF;
  RETURN NULL;
END $$
"""
HELD = "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def left(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


def entries_without_their_job(sql: Sql) -> int:
    query = "SELECT count(*) FROM jsworker.job_events WHERE job_id NOT IN (SELECT id FROM jsworker.jobs)"
    return int(read_value(sql, query))


def jobs_without_their_entry(sql: Sql) -> int:
    query = "SELECT count(*) FROM jsworker.jobs WHERE id NOT IN (SELECT job_id FROM jsworker.job_events)"
    return int(read_value(sql, query))


def insert_old(sql: Sql, status: str = "completed", *, kind: str = "old", days: float = 9) -> UUID:
    return insert_job(sql, status, kind=kind, finished_at=ago(days * DAY))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWORKER_STATEMENT_TIMEOUT", "1.5")
    monkeypatch.setattr("jsworker.cli.selection._STATEMENT_SECONDS", 1.5)


class TestWhatGoes:
    def test_by_default_what_is_older_than_the_retention(self, cli: Cli, sql: Sql) -> None:
        insert_old(sql, days=8)
        insert_old(sql, days=6)
        insert_job(sql, "queued", created_at=ago(9 * DAY))
        sql.execute(TIMELINES)
        assert cli("prune").ok().lines == ["1 job deleted; timeline entries: 1"]
        assert left(sql) == 2
        assert entries_without_their_job(sql) == 0

    def test_the_retention_of_the_environment_counts(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_RETENTION", str(10 * DAY))
        insert_old(sql)
        assert cli("prune").ok().lines == ["0 jobs deleted; timeline entries: 0"]

    def test_older_than_wins(self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_RETENTION", "none")
        insert_old(sql, days=2)
        insert_old(sql, days=0.5)
        assert cli("prune", "--older-than", DAY, "--json").ok().json == {
            "jobs": 1,
            "timeline_entries": 0,
            "audit_entries": 0,
            "kept": 0,
            "kept_workflows": 0,
            "older_than": DAY,
            "dry_run": False,
        }

    def test_more_jobs_than_fit_one_statement(self, cli: Cli, sql: Sql) -> None:
        sql.execute(OLD_JOBS, [3500])
        assert cli("prune", "--json").ok().json["jobs"] == 3500
        assert left(sql) == 0

    def test_one_kind_and_one_status(self, cli: Cli, sql: Sql) -> None:
        for kind in ("a", "b"):
            for status in ("completed", "failed", "cancelled"):
                insert_old(sql, status, kind=kind)
        assert cli("prune", "--kind", "a", "--status", "failed", "--json").ok().json["jobs"] == 1
        assert cli("prune", "--status", "failed", "--json").ok().json["jobs"] == 1
        assert cli("prune", "--kind", "a", "--json").ok().json["jobs"] == 2
        assert left(sql) == 2


class TestRefused:
    def test_what_a_foreign_key_keeps_is_named_and_the_others_go(self, cli: Cli, sql: Sql) -> None:
        kept, _ = insert_old(sql), insert_old(sql)
        sql.execute("CREATE TABLE orders (job_id uuid CONSTRAINT of_job REFERENCES jsworker.jobs)")
        try:
            sql.execute("INSERT INTO orders VALUES (%s)", [kept])
            found = cli("prune")
            assert found.out == "1 job deleted; timeline entries: 0; kept because PostgreSQL refuses: 1\n"
            refusal = f"job {kept} kept: PostgreSQL refuses to delete, SQLSTATE 23503, constraint of_job"
            assert found.code == 0
            assert refusal in found.err
            again = cli("prune", "--json").ok().json
            assert (again["jobs"], again["kept"]) == (0, 1)
        finally:
            sql.execute("DROP TABLE orders")
        assert left(sql) == 1

    def test_workflows_that_a_foreign_key_keeps_are_named(self, cli: Cli, sql: Sql) -> None:
        """Their jobs stay, too, which are no refused ones."""
        sql.execute(OLD_WORKFLOWS, [3])
        sql.execute("CREATE TABLE orders (flow uuid CONSTRAINT of_flow REFERENCES jsworker.workflows)")
        try:
            sql.execute("INSERT INTO orders SELECT id FROM jsworker.workflows LIMIT 2")
            found = cli("prune")
            assert found.out == "1 job deleted; timeline entries: 0; workflows kept, with their jobs: 2\n"
            assert found.err.startswith("workflow ")
            assert found.err.endswith(
                " and 1 others kept: PostgreSQL refuses to delete, SQLSTATE 23503, constraint of_flow\n"
            )
            again = cli("prune", "--json").json
            assert (again["jobs"], again["kept"], again["kept_workflows"]) == (0, 0, 2)
        finally:
            sql.execute("DROP TABLE orders")


class TestDryRun:
    def test_it_counts_and_deletes_nothing(self, cli: Cli, sql: Sql) -> None:
        insert_old(sql)
        insert_old(sql, "failed")
        assert cli("prune", "--dry-run").ok().lines == ["2 jobs would be deleted"]
        assert cli("prune", "--dry-run", "--status", "failed").ok().lines == ["1 job would be deleted"]
        found = cli("prune", "--dry-run", "--json").ok().json
        assert (found["jobs"], found["timeline_entries"], found["dry_run"]) == (2, None, True)
        assert left(sql) == 2

    def test_with_a_filter_jobs_of_workflows_stay_and_are_not_counted(self, cli: Cli, sql: Sql) -> None:
        sql.execute(OLD_WORKFLOWS, [1])
        for filtered in (["--kind", "old"], ["--status", "completed"]):
            assert cli("prune", "--dry-run", *filtered).ok().lines == ["0 jobs would be deleted"]
            assert cli("prune", *filtered).ok().lines == ["0 jobs deleted; timeline entries: 0"]
        assert cli("prune", "--dry-run").ok().lines == ["1 job would be deleted"]
        assert cli("prune").ok().lines == ["1 job deleted; timeline entries: 0"]


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--older-than", "soon"], "--older-than='soon' must be a number of seconds"),
            (["--older-than", "-1"], "--older-than=-1 must be greater than 0 and at most 1000000000"),
            (["--older-than", "1200"], "--older-than=1200 must exceed 2 × JSWORKER_ACK_WAIT=600"),
            (
                ["--older-than", "none"],
                "prune needs --older-than SECONDS: JSWORKER_RETENTION is none, which keeps jobs for ever",
            ),
            (["--status", "queued"], "'queued' is not one of 'completed', 'failed', 'cancelled'"),
            (["--kind", "No Kind"], "No Kind"),
        ],
    )
    def test_it_is_one_line(self, cli: Cli, sql: Sql, arguments: list[str], line: str) -> None:
        insert_old(sql)
        assert line in cli("prune", *arguments).refused(2)
        assert left(sql) == 1

    def test_without_any_age_nothing_is_deleted(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_RETENTION", "none")
        insert_old(sql)
        assert cli("prune").refused(2).startswith("prune needs --older-than SECONDS")
        assert left(sql) == 1

    def test_a_database_that_is_away_is_one_line_and_no_count(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
        for arguments in ([], ["--dry-run"], ["--json"]):
            assert "127.0.0.1:1/none" in cli("prune", *arguments).refused(1)


@contextmanager
def holding(sql: Sql, hold: LiteralString, environment: Mapping[str, str]) -> Iterator[Holder]:
    sql.execute(hold)
    sql.execute(HOLD_DELETES)
    holder = psycopg.connect(environment["JSWORKER_DATABASE_URL"], autocommit=True)
    holder.execute("SELECT pg_advisory_lock(42)")
    yield holder
    holder.close()
    sql.execute("DROP FUNCTION jsworker.hold() CASCADE")


@pytest.fixture
def held(sql: Sql, cli_environment: Mapping[str, str]) -> Iterator[Holder]:
    """Keeps every deletion from ending until this connection lets go of its lock."""
    with holding(sql, HOLD, cli_environment) as holder:
        yield holder


@pytest.fixture
def held_later(sql: Sql, cli_environment: Mapping[str, str]) -> Iterator[Holder]:
    """The same, but the first three deletions end."""
    with holding(sql, HOLD_LATER, cli_environment) as holder:
        yield holder
    sql.execute("DROP SEQUENCE jsworker.batches_deleted")


class TestStopped:
    def test_ctrl_c_ends_it_after_the_present_batch_which_is_counted(
        self, spawn: Spawn, sql: Sql, held: Holder
    ) -> None:
        sql.execute(OLD_JOBS, [1000])
        sql.execute(TIMELINES)
        process = spawn("prune")
        wait_until(lambda: read_value(sql, HELD), "a batch is being deleted")
        process.signal(signal.SIGINT)
        assert "stopping after this batch" in process.read_errors_until("stopping")
        held.execute("SELECT pg_advisory_unlock(42)")
        found = process.wait()
        assert found.code == 130
        assert found.out == "100 jobs deleted; timeline entries: 100\n"
        assert left(sql) == 900
        assert entries_without_their_job(sql) == jobs_without_their_entry(sql) == 0

    @pytest.mark.usefixtures("held")
    def test_a_second_ctrl_c_waits_for_nothing(self, spawn: Spawn, sql: Sql) -> None:
        sql.execute(OLD_JOBS, [1000])
        process = spawn("prune", "--json")
        wait_until(lambda: read_value(sql, HELD), "a batch is being deleted")
        process.signal(signal.SIGINT)
        process.read_errors_until("stopping")
        process.signal(signal.SIGINT)
        found = process.wait()
        assert (found.code, found.json["jobs"]) == (130, 0)
        assert left(sql) == 1000

    def test_a_kill_leaves_whole_jobs_and_whole_timelines(
        self, cli: Cli, spawn: Spawn, sql: Sql, held_later: Holder
    ) -> None:
        sql.execute(OLD_JOBS, [100_000])
        sql.execute(TIMELINES)
        process = spawn("prune")
        wait_until(lambda: read_value(sql, HELD), "a later batch is being deleted")
        process.signal(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        held_later.execute("SELECT pg_advisory_unlock(42)")
        wait_until(lambda: read_value(sql, SESSIONS) == 1, "its last statement has ended")
        assert 0 < left(sql) < 100_000
        assert entries_without_their_job(sql) == jobs_without_their_entry(sql) == 0
        before = left(sql)
        assert cli("prune", "--json").ok().json["jobs"] == before

    def test_a_terminal_shows_a_bar(
        self, sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str]
    ) -> None:
        sql.execute(OLD_JOBS, [20_000])
        terminal = Terminal("prune", cwd=tmp_path, environment={**os.environ, **cli_environment})
        assert terminal.wait() == 0
        assert re.search(r"deleted .*/20000", terminal.plain_text)
        assert "20000 jobs deleted" in terminal.plain_text

    @pytest.mark.usefixtures("impatient")
    def test_where_a_batch_takes_too_long_fewer_go_at_once(self, cli: Cli, sql: Sql) -> None:
        sql.execute(OLD_JOBS, [120])
        with slow_rows(sql, "DELETE", "jobs", 0.03):
            assert cli("prune").ok().lines == ["120 jobs deleted; timeline entries: 0"]
        assert left(sql) == 0

    @pytest.mark.usefixtures("impatient")
    def test_a_count_that_takes_too_long_is_left_out_of_the_bar(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jsworker.cli.prune.progress_wanted", lambda *, as_json: not as_json)
        monkeypatch.setattr(pruning, "OLD_JOBS", text("SELECT 1 AS jobs FROM pg_sleep(60)"))
        sql.execute(OLD_JOBS, [3])
        assert cli("prune").lines == ["3 jobs deleted; timeline entries: 0"]
        assert left(sql) == 0
