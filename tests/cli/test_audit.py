"""``jsworker audit`` and ``reschedule``: who did what, and another time for jobs that wait for one."""

from collections.abc import Iterator

import pytest
from psycopg.sql import SQL, Identifier

from tests.ownership.rows import Sql, ago, insert_job, read_job, read_value

from .commands import Cli


def test_what_commands_did_is_listed(cli: Cli, sql: Sql) -> None:
    failed, waiting = insert_job(sql, "failed", last_error="OSError: full"), insert_job(sql)
    assert cli("audit").err == "there are no entries; they are kept for 400 days\n"
    cli("retry", "--error", "full", "--kind", "count-lines", "--yes").ok()
    assert cli("cancel", waiting, insert_job(sql, "completed")).code == 1
    cli("priority", failed, "high").ok()
    found = cli("audit", "--json").ok().json
    assert [(each["action"], each["matched"], each["changed"]) for each in found] == [
        ("set_priority", 1, 1),
        ("cancel", 2, 1),
        ("retry", 1, 1),
    ]
    assert "@" in found[0]["actor"]
    listed = cli("audit", "--limit", "2")
    assert "1 of 2" in listed.out
    assert "--after" in listed.err
    behind = cli("audit", "--after", found[1]["action_id"]).ok().out
    assert "status failed" in behind
    assert "error not recorded" in behind
    assert "full" not in behind


def test_an_entry_whose_target_is_no_object_is_listed(cli: Cli, sql: Sql) -> None:
    cli("cancel", insert_job(sql)).ok()
    sql.execute("UPDATE jsworker.audit SET target = '7'")
    assert "target 7" in cli("audit").ok().out


def test_a_command_that_found_nothing_is_not_listed(cli: Cli, sql: Sql) -> None:
    insert_job(sql, "failed", last_error="other")
    assert cli("retry", "--error", "full", "--yes").code == 0
    assert cli("audit", "--json").ok().json == []


def test_jobs_are_rescheduled(cli: Cli, sql: Sql) -> None:
    job_id, queued = insert_job(sql, "scheduled"), insert_job(sql)
    assert cli("reschedule", job_id, "--at", "2031-05-01T08:00:00Z").ok().lines == [f"{job_id} scheduled"]
    assert read_job(sql, job_id)["run_at"].isoformat().startswith("2031-05-01T")
    assert "it was put off to 2031-05-01" in cli("job", job_id).ok().out
    found = cli("reschedule", queued, job_id, "--delay", "0")
    assert (found.code, found.errors) == (
        1,
        [f"job {queued} is queued; only a job that waits for a time can be rescheduled"],
    )


@pytest.fixture
def _an_hour_ahead(sql: Sql) -> Iterator[None]:
    """Let the clock of the database be an hour ahead of this machine's."""
    database = Identifier(sql.info.dbname)
    sql.execute("CREATE SCHEMA ahead")
    sql.execute(
        "CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql"
        " AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$"
    )
    sql.execute(SQL("ALTER DATABASE {} SET search_path = ahead, pg_catalog, public").format(database))
    yield
    sql.execute(SQL("ALTER DATABASE {} RESET search_path").format(database))
    sql.execute("DROP SCHEMA ahead CASCADE")


@pytest.mark.usefixtures("_an_hour_ahead")
def test_a_delay_is_reckoned_by_the_clock_of_the_database(cli: Cli, sql: Sql) -> None:
    job_id = insert_job(sql, "scheduled")
    cli("reschedule", job_id, "--delay", "600").ok()
    ahead = "SELECT extract(epoch FROM run_at - pg_catalog.clock_timestamp()) AS s FROM jsworker.jobs"
    assert 3600 < float(read_value(sql, ahead)) <= 4200


WITH_ZONE = "must be a time with its zone, as 2030-01-31T18:00+01:00 or 2030-01-31T17:00Z"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "reschedule takes --at TIME or --delay SECONDS"),
        (("--at", "soon"), f"--at 'soon' {WITH_ZONE}"),
        (("--at", "2031-05-01 08:00"), f"--at '2031-05-01 08:00' {WITH_ZONE}"),
        (
            ("--at", "0001-01-01T00:00:00+14:00"),
            "--at 0001-01-01T00:00:00+14:00 must be from 2000 on and at most ten years ahead",
        ),
        (("--delay", "-1"), "--delay -1 must be from 0 to 316224000"),
    ],
)
def test_wrong_times_are_refused(cli: Cli, sql: Sql, options: tuple[str, ...], why: str) -> None:
    assert cli("reschedule", insert_job(sql, "scheduled"), *options).refused(2) == why


def test_jobs_are_listed_by_what_they_have_in_common(cli: Cli, sql: Sql) -> None:
    old = insert_job(sql, "failed", last_error="OSError: full", created_at=ago(86400))
    new = insert_job(sql, limit_key="tenant-7", unique_key="order 7")
    insert_job(sql)
    for options, wanted in (
        (("--key", "tenant-7"), new),
        (("--unique-key", "order 7"), new),
        (("--error", "FULL"), old),
        (("--status", "failed", "--until", "2099-01-01"), old),
    ):
        assert [each["id"] for each in cli("jobs", *options, "--json").ok().json] == [str(wanted)]
    assert cli("jobs", "--key", "").refused(2) == "--key '' must be a text of 1 to 1000 characters"
    why = "--since '0001-01-01T00:00+14:00' is too early or too late"
    assert cli("jobs", "--since", "0001-01-01T00:00+14:00").refused(2) == why
