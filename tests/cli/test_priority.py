"""``jsworker priority``, and ``--priority`` of the commands about jobs."""

import re
from uuid import uuid4

import pytest

from tests.ownership.rows import Sql, insert_job, read_job

from .commands import Cli


def test_waiting_jobs_get_another_priority(cli: Cli, sql: Sql) -> None:
    queued, scheduled = insert_job(sql), insert_job(sql, "scheduled")
    found = cli("priority", queued, scheduled, queued, "high").ok()
    assert found.lines == [f"{queued} high", f"{scheduled} high"]
    row = read_job(sql, queued)
    assert (row["priority"], row["dispatch"], row["needs_publish"]) == (0, 2, True)
    assert read_job(sql, scheduled)["priority"] == 0
    shown = cli("job", queued).ok().out
    assert "high" in shown
    assert "its priority was set to high, from normal" in shown


def test_others_are_refused_one_by_one(cli: Cli, sql: Sql) -> None:
    running, waiting, unknown = insert_job(sql, "processing"), insert_job(sql), uuid4()
    found = cli("priority", running, waiting, unknown, "low", "--json")
    assert found.code == 1
    assert found.json == [
        {"id": str(running), "outcome": "refused"},
        {"id": str(waiting), "outcome": "low"},
        {"id": str(unknown), "outcome": "refused"},
    ]
    assert found.errors == [
        f"job {running} is processing; only a waiting job's priority can be set",
        f"job {unknown} does not exist",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("priority", "00000000-0000-0000-0000-000000000000", "urgent"),
        ("priority", "00000000-0000-0000-0000-000000000000", "0"),
        ("priority", "no-id", "high"),
        ("priority", "high"),
        ("enqueue", "double", "--priority", "HIGH"),
        ("jobs", "--priority", "1"),
        ("cancel", "--priority", "", "--yes"),
    ],
)
def test_bad_input_is_refused_in_a_line(cli: Cli, sql: Sql, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).refused(2)
    assert sql.execute("SELECT FROM jsworker.jobs").rowcount == 0


def test_jobs_are_enqueued_and_listed_by_priority(cli: Cli) -> None:
    ids = {}
    for priority in ("high", "normal", "low"):
        [ids[priority]] = cli("enqueue", "double", "--priority", priority).ok().lines
    for priority, job_id in ids.items():
        for status in ((), ("--status", "queued"), ("--status", "queued", "--kind", "double")):
            found = cli("jobs", "--priority", priority, *status, "--json").ok().json
            assert [job["id"] for job in found] == [job_id]
    assert cli("jobs", "--priority", "low", "--status", "scheduled", "--json").ok().json == []


def test_filters_choose_by_priority(cli: Cli, sql: Sql) -> None:
    low, high = insert_job(sql, priority=2), insert_job(sql, priority=0)
    failed = insert_job(sql, "failed", priority=2)
    running = insert_job(sql, "processing", priority=2)
    assert cli("retry", "--priority", "low", "--yes").ok().lines == [f"{failed} queued"]
    assert cli("clear", "--priority", "low", "--reason", "r", "--yes").ok().lines == [f"{running} queued"]
    cancelled = cli("cancel", "--priority", "low", "--status", "queued", "--yes").ok().lines
    assert sorted(cancelled) == sorted(f"{each} cancelled" for each in (low, failed, running))
    assert read_job(sql, high)["status"] == "queued"


def test_a_schedule_has_a_priority(cli: Cli) -> None:
    cli("schedules", "add", "nightly", "double", "--every", 3600, "--priority", "low").ok_unserved("double")
    [schedule] = cli("schedules", "list", "--json").ok().json
    assert schedule["priority"] == "low"


def test_consumers_of_lanes_are_made_on_request_and_the_doctor_knows_them(cli: Cli) -> None:
    made = cli("stream", "ensure", "double", "--lanes", "--json").ok().json
    assert made["kinds"] == ["double"]
    cli("enqueue", "double", "--priority", "high").ok()
    told = " ".join(cli("doctor").out.split())
    holds = r"consumer double=high holds \d+ messages?, and no worker of this kind claims jobs"
    assert re.search(holds, told)
    assert "jsworker cancel --kind double`" in told
    assert "is not as it must be" not in told
