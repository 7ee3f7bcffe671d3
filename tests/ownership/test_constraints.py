"""The net below the guards: PostgreSQL itself refuses rows and steps that the protocol does not know."""

from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.errors import CheckViolation, RestrictViolation, UniqueViolation

from .rows import HELD, NOW, OTHER_WORKER, STATES, WORKER, Sql, change_job, insert_job, read_job

FINAL = ("completed", "failed", "cancelled")
LIVE = ("scheduled", "queued", "processing")

TIMES = ("run_at", "queued_at", "publish_after", "published_at", "stream_created", "created_at")


def refused_row(constraint: str, state: str, /, **columns: Any) -> Any:
    shown = ", ".join(f"{name}={value}" for name, value in columns.items() if not hasattr(value, "as_string"))
    return pytest.param(constraint, state, columns, id=f"{constraint}: {state} {shown or ', '.join(columns)}")


@pytest.mark.parametrize("status", STATES)
def test_the_usual_row_of_each_state_is_accepted(sql: Sql, status: str) -> None:
    assert read_job(sql, insert_job(sql, status))["status"] == status


BROKEN = [
    refused_row("jobs_status", "queued", status="running"),
    refused_row("jobs_kind", "queued", kind=""),
    refused_row("jobs_kind", "queued", kind="a.b"),
    refused_row("jobs_kind", "queued", kind="Upper"),
    refused_row("jobs_kind", "queued", kind="-a"),
    refused_row("jobs_kind", "queued", kind="a" * 65),
    refused_row("jobs_kind", "queued", kind="a\n"),
    refused_row("jobs_unique_key", "queued", unique_key=""),
    *(
        refused_row("jobs_unique_key", "queued", unique_key=f"a{end}")
        for end in "\1\n\x1b\x1f\x7f\x85\u2028\u2029"
    ),
    refused_row("jobs_unique_key", "queued", unique_key="a" * 256),
    refused_row("jobs_waiting_key", "queued", unique_key="a", waiting_key="a"),
    refused_row("jobs_expires_at", "queued", expires_at="infinity"),
    refused_row("jobs_owner_iff_processing", "processing", worker_id=None),
    *(refused_row("jobs_owner_iff_processing", s, worker_id=WORKER) for s in STATES if s != "processing"),
    refused_row("jobs_activity_iff_processing", "processing", last_activity_at=None),
    *(
        refused_row("jobs_activity_iff_processing", s, last_activity_at=NOW)
        for s in STATES
        if s != "processing"
    ),
    *(refused_row("jobs_finished_iff_final", status, finished_at=None) for status in FINAL),
    *(refused_row("jobs_finished_iff_final", status, finished_at=NOW) for status in LIVE),
    refused_row("jobs_scheduled_waits", "scheduled", run_at=None),
    refused_row("jobs_scheduled_waits", "scheduled", held_by="limit", held_at=NOW),
    refused_row("jobs_held", "scheduled", **HELD | {"held_by": "whim"}),
    refused_row("jobs_held", "scheduled", **HELD | {"held_at": None}),
    refused_row("jobs_held", "scheduled", **HELD | {"held_at": "infinity"}),
    refused_row("jobs_held", "scheduled", **HELD | {"due_at": "1999-12-31 23:59:59+00"}),
    *(refused_row("jobs_held", status, **HELD) for status in ("queued", "processing", "completed", "failed")),
    *(refused_row("jobs_held", status, held_at=NOW) for status in STATES),
    *(refused_row("jobs_held", status, due_at=NOW) for status in STATES),
    *(refused_row("jobs_limit_key", "queued", limit_key=f"a{end}") for end in "\1\n\x1b\x7f\u2028"),
    refused_row("jobs_limit_key", "queued", limit_key="a" * 256),
    *(
        refused_row("jobs_publish_only_queued", s, needs_publish=True, publish_after=NOW)
        for s in STATES
        if s != "queued"
    ),
    refused_row("jobs_publish_has_time", "queued", needs_publish=True, publish_after=None),
    refused_row("jobs_cancel_is_not_waiting", "queued", cancel_requested=True),
    refused_row("jobs_cancel_is_not_waiting", "scheduled", cancel_requested=True),
    *(refused_row("jobs_conservation", status, attempts=2) for status in STATES),
    *(refused_row("jobs_conservation", status, errors=2) for status in STATES),
    *(refused_row("jobs_conservation", status, stalls=2) for status in STATES),
    refused_row("jobs_counters", "queued", errors=-1, stalls=1),
    refused_row("jobs_counters", "queued", errors=1, stalls=-1),
    refused_row("jobs_limits", "queued", max_attempts=0),
    refused_row("jobs_limits", "queued", max_stalls=0),
    refused_row("jobs_limits", "queued", max_attempts=1_000_001),
    refused_row("jobs_limits", "queued", max_stalls=101, fencing_token=0),
    refused_row("jobs_numbers", "queued", dispatch=-1),
    refused_row("jobs_numbers", "queued", dispatch=2**53 + 1),
    refused_row("jobs_numbers", "queued", dispatch=2**52 + 1),
    refused_row("jobs_numbers", "scheduled", dispatch=2**52),
    refused_row("jobs_numbers", "queued", fencing_token=2**53 + 1),
    refused_row("jobs_numbers", "queued", stream_seq=-1),
    refused_row("jobs_times", "queued", queued_at=None),
    *(
        refused_row("jobs_times", "scheduled", **{column: time})
        for column in TIMES
        for time in (
            "-infinity",
            "0044-03-15 BC",
            "1999-12-31 23:59:59+00",
            "9999-12-31 00:00:01+00",
            "infinity",
        )
    ),
    refused_row("jobs_priority", "queued", priority=-1),
    refused_row("jobs_priority", "queued", priority=3),
    refused_row("jobs_progress", "processing", progress=-0.1),
    refused_row("jobs_progress", "processing", progress=1.1),
    refused_row("jobs_progress", "processing", progress=float("nan")),
    refused_row("jobs_priority", "queued", priority=-1),
    refused_row("jobs_priority", "queued", priority=3),
]


@pytest.mark.parametrize(("constraint", "status", "columns"), BROKEN)
def test_a_row_that_breaks_a_rule_is_refused(
    sql: Sql, constraint: str, status: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(CheckViolation) as refused:
        insert_job(sql, status, **columns)
    assert (refused.value.sqlstate, refused.value.diag.constraint_name) == ("23514", constraint)


def test_every_constraint_is_broken_once(sql: Sql) -> None:
    checks = sql.execute(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'jsworker.jobs'::regclass AND contype = 'c'"
    )
    assert {check["conname"] for check in checks} == {case.values[0] for case in BROKEN}


@pytest.mark.parametrize(
    "columns",
    [
        {"unique_key": "order_17.a-b"},
        {"unique_key": "a@b.example/Ä 漢"},
        {"unique_key": "漢" * 255},
        {"kind": "a" * 64},
        {"kind": "0_a-b"},
        {"limit_key": ""},
        {"limit_key": "漢" * 255},
        {"errors": 1, "stalls": 2, "attempts": 3},
        {"progress": 0.0},
        {"progress": 1.0},
        {"max_attempts": 1, "max_stalls": 1},
        {"run_at": NOW},
        {"needs_publish": True},
        {"max_attempts": 1_000_000, "max_stalls": 100, "fencing_token": 0},
        {"max_stalls": 1_000_000, "fencing_token": 1},
        {"dispatch": 2**52},
        {"dispatch": 2**53, "fencing_token": 2**53, "stream_seq": 2**53},
        dict.fromkeys(TIMES, "2000-01-01 00:00+00"),
        dict.fromkeys(TIMES, "9999-12-31 00:00+00"),
    ],
)
def test_the_edge_of_a_rule_is_accepted(sql: Sql, columns: dict[str, Any]) -> None:
    insert_job(sql, "queued", **columns)


def test_a_final_job_may_have_been_asked_to_cancel(sql: Sql) -> None:
    for status in (*FINAL, "processing"):
        insert_job(sql, status, cancel_requested=True)


OTHER_STATES = [
    (status, {"status": other})
    for status in ("completed", "cancelled")
    for other in STATES
    if other != status and (status, other) != ("cancelled", "queued")
]
RETRIED: dict[str, Any] = {"status": "queued", "finished_at": None, "queued_at": NOW, "dispatch": 2}
RETRIED |= {"needs_publish": True, "publish_after": NOW, "failure_reason": None}
"""What RETRY writes into the row of a cancelled job, among others."""
OTHER_THAN_RETRIED = [("failed", {"status": other}) for other in STATES if other not in ("failed", "queued")]


@pytest.mark.parametrize(
    ("status", "step"),
    [
        *OTHER_STATES,
        *OTHER_THAN_RETRIED,
        *(
            ("cancelled", RETRIED | other)
            for other in ({"dispatch": 1}, {"needs_publish": False}, {"last_error": "x"}, {"payload": "1"})
        ),
        ("processing", {"fencing_token": 0}),
        ("completed", {"fencing_token": 0}),
        ("queued", {"dispatch": 0}),
        ("processing", {"dispatch": 0}),
        ("queued", STATES["processing"] | {"status": "processing", "fencing_token": 0}),
        ("processing", {"status": "processing", "worker_id": OTHER_WORKER}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in list(value.items())[-2:])
    ),
)
def test_a_step_that_the_protocol_does_not_know_is_refused(
    sql: Sql, status: str, step: dict[str, Any]
) -> None:
    job_id = insert_job(sql, status)
    with pytest.raises(RestrictViolation) as refused:
        change_job(sql, job_id, **step)
    assert (refused.value.sqlstate, refused.value.diag.constraint_name) == ("23001", "jobs_guard")
    assert (refused.value.diag.schema_name, refused.value.diag.table_name) == ("jsworker", "jobs")


@pytest.mark.parametrize(
    ("status", "step"),
    [
        ("failed", {"status": "queued", "finished_at": None, "attempts": 0, "errors": 0, "queued_at": NOW}),
        ("cancelled", RETRIED),
        ("queued", STATES["processing"] | {"status": "processing"}),
        ("processing", {"status": "processing", "worker_id": OTHER_WORKER, "fencing_token": 2}),
        ("processing", {"status": "processing", "last_activity_at": NOW}),
        ("completed", {"status": "completed", "fencing_token": 1, "dispatch": 1}),
        ("queued", {"dispatch": 2}),
    ],
)
def test_a_step_of_the_protocol_passes_the_guard(sql: Sql, status: str, step: dict[str, Any]) -> None:
    job_id = insert_job(sql, status)
    change_job(sql, job_id, **step)


def test_what_was_cancelled_for_its_needs_is_not_queued(sql: Sql) -> None:
    job_id = insert_job(sql, "cancelled", failure_reason="needs")
    with pytest.raises(RestrictViolation, match="what a job was and came to stays"):
        change_job(sql, job_id, **RETRIED)


CONTENT: dict[str, Any] = {
    "kind": "other-kind",
    "payload": '{"other": 1}',
    "unique_key": "other-key",
    "result": '"other"',
    "last_error": "other",
}


@pytest.mark.parametrize("status", FINAL)
@pytest.mark.parametrize("column", [*CONTENT, "failure_reason", "counters"])
def test_what_an_ended_job_was_and_came_to_stays(sql: Sql, status: str, column: str) -> None:
    job_id = insert_job(sql, status)
    before = read_job(sql, job_id)
    counters = {"attempts": before["attempts"] + 1, "errors": before["errors"] + 1}
    step = counters if column == "counters" else {column: CONTENT.get(column, "other")}
    with pytest.raises(RestrictViolation, match="what a job was and came to stays") as refused:
        change_job(sql, job_id, **step)
    assert refused.value.diag.constraint_name == "jobs_guard"
    assert read_job(sql, job_id) == before


@pytest.mark.parametrize("status", FINAL)
def test_an_ended_job_keeps_its_id(sql: Sql, status: str) -> None:
    job_id = insert_job(sql, status)
    with pytest.raises(RestrictViolation):
        sql.execute("UPDATE jsworker.jobs SET id = gen_random_uuid() WHERE id = %s", [job_id])


@pytest.mark.parametrize("column", CONTENT)
def test_a_retry_changes_nothing_of_what_the_job_was(sql: Sql, column: str) -> None:
    job_id = insert_job(sql, "failed")
    retry = {"status": "queued", "finished_at": None, "attempts": 0, "errors": 0, "queued_at": NOW}
    with pytest.raises(RestrictViolation):
        change_job(sql, job_id, **retry, **{column: CONTENT[column]})
    change_job(sql, job_id, **retry)


@pytest.mark.parametrize("first", LIVE)
@pytest.mark.parametrize("second", LIVE)
def test_two_live_jobs_cannot_hold_one_key(sql: Sql, first: str, second: str) -> None:
    insert_job(sql, first, unique_key="order-1")
    with pytest.raises(UniqueViolation) as refused:
        insert_job(sql, second, unique_key="order-1")
    assert refused.value.diag.constraint_name == "jobs_unique_live"
    insert_job(sql, second, unique_key="order-1", kind="other-kind")


@pytest.mark.parametrize("status", FINAL)
def test_a_final_job_frees_its_key(sql: Sql, status: str) -> None:
    insert_job(sql, status, unique_key="order-1")
    insert_job(sql, status, unique_key="order-1")
    insert_job(sql, "queued", unique_key="order-1")


@pytest.mark.parametrize(
    ("constraint", "statement"),
    [
        (
            "installation_one_row",
            "INSERT INTO jsworker.installation (singleton, id) VALUES (2, gen_random_uuid())",
        ),
        (
            "workers_state",
            """
            INSERT INTO jsworker.workers (
              id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)
            VALUES ('w', 'h', 1, '{}', 1, '1', '5 s', 'asleep')
            """,
        ),
    ],
)
def test_the_other_tables_have_rules_too(sql: Sql, constraint: str, statement: LiteralString) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        sql.execute(statement)
    assert refused.value.diag.constraint_name == constraint


@pytest.mark.parametrize("status", LIVE)
def test_a_live_job_cannot_be_deleted(sql: Sql, status: str) -> None:
    job_id = insert_job(sql, status)
    with pytest.raises(RestrictViolation, match=f"a job that is {status}: cancel it first") as refused:
        sql.execute("DELETE FROM jsworker.jobs WHERE id = %s", [job_id])
    assert refused.value.diag.constraint_name == "jobs_live_stay"


@pytest.mark.parametrize("status", FINAL)
def test_an_ended_job_can_be_deleted(sql: Sql, status: str) -> None:
    job_id = insert_job(sql, status)
    assert sql.execute("DELETE FROM jsworker.jobs WHERE id = %s", [job_id]).rowcount == 1


def test_live_jobs_cannot_be_truncated(sql: Sql) -> None:
    insert_job(sql, "completed")
    insert_job(sql, "queued")
    with pytest.raises(RestrictViolation, match="some wait or run"):
        sql.execute("TRUNCATE jsworker.jobs")
    sql.execute("UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now() WHERE status = 'queued'")
    sql.execute("TRUNCATE jsworker.jobs")
