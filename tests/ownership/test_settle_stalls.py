"""FAIL of a run whose process died in quarantine: a stall, counted and limited as such."""

from itertools import product
from typing import Any

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import settle
from jsworker.ownership.transitions.reset import reset_dead
from jsworker.ownership.transitions.settle import Failure, Settled

from .rows import NOW, OTHER_WORKER, WORKER, Sql, age, counters, insert_job, read_events, read_job

ERROR = "the quarantined process was killed"


def ended(*, cancel: bool, permanent: str | None, stalls: int, max_stalls: int) -> tuple[str, str | None]:
    """Return the status and the reason of a failure by the protocol's FAIL."""
    if cancel:
        return "cancelled", None
    if permanent:
        return "failed", permanent
    return ("failed", "stalled") if stalls + 1 >= max_stalls else ("scheduled", None)


@pytest.mark.parametrize(
    ("cancel", "permanent", "stalls", "max_stalls"),
    list(product([False, True], [None, "permanent"], [0, 1, 2], [1, 2, 3])),
)
async def test_counts_a_stall_and_no_error(
    database: Database, sql: Sql, *, cancel: bool, permanent: str | None, stalls: int, max_stalls: int
) -> None:
    """One more error would be the last of this row's attempts; a stall is none."""
    row: dict[str, Any] = {"errors": 2, "max_attempts": 3, "stalls": stalls, "attempts": 3 + stalls}
    job_id = insert_job(
        sql,
        "processing",
        max_stalls=max_stalls,
        cancel_requested=cancel,
        cleared=True,
        clear_reason="r",
        **row,
    )
    runs = [Failure(job_id, 1, ERROR, permanent, 60.0, stalled=True)]
    (settled,) = await settle.fail(database, worker_id=WORKER, runs=runs)
    job = read_job(sql, job_id)
    status, reason = ended(cancel=cancel, permanent=permanent, stalls=stalls, max_stalls=max_stalls)
    assert (settled, job["status"], job["failure_reason"]) == (Settled(status), status, reason)
    assert counters(job) == (3 + stalls, 2, stalls + 1)
    assert (job["last_error"], job["cleared"], job["clear_reason"]) == (ERROR, False, None)
    assert (job["worker_id"], job["finished_at"] is None) == (None, status == "scheduled")
    (event,) = read_events(sql, job_id)
    assert event["event"] == ("error" if status == "scheduled" else status)
    assert (event["worker_id"], event["fencing_token"], event["error"]) == (WORKER, 1, ERROR)
    detail = {"errors": 2, "stalls": stalls + 1} | ({"reason": reason} if reason else {})
    assert {name: event["detail"][name] for name in event["detail"] if name != "run_at"} == detail
    # The answer was lost and the outcome is written again: it is recognised, and counted once.
    assert await settle.fail(database, worker_id=WORKER, runs=runs) == [settled]
    assert read_job(sql, job_id) == job
    assert len(read_events(sql, job_id)) == 1


@pytest.mark.parametrize(("stalls", "seconds"), [(3, 20), (6, 160), (9, 600), (90, 600)])
async def test_the_next_attempt_waits_as_after_any_counted_stall(
    database: Database, sql: Sql, stalls: int, seconds: float
) -> None:
    row = {"stalls": stalls, "attempts": stalls + 1, "max_stalls": 100, "progress_at": NOW}
    dead, silent = (insert_job(sql, "processing", **row) for _ in range(2))
    await settle.fail(database, worker_id=WORKER, runs=[Failure(dead, 1, ERROR, None, 0.0, stalled=True)])
    await reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="dead")
    for job_id in (dead, silent):
        job = read_job(sql, job_id)
        assert (job["status"], job["stalls"]) == ("scheduled", stalls + 1)
        assert 0.8 * seconds - 10 < -age(sql, job["run_at"]) < 1.2 * seconds


async def test_stalls_and_errors_in_one_batch(database: Database, sql: Sql) -> None:
    row: dict[str, Any] = {"errors": 1, "stalls": 1, "attempts": 3, "max_attempts": 2, "max_stalls": 3}
    error, stall, refused, late = (insert_job(sql, "processing", **row) for _ in range(4))
    runs = [
        Failure(error, 1, "broken", None, 1.0),
        Failure(stall, 1, ERROR, None, 1.0, stalled=True),
        Failure(refused, 1, "no text: \0", None, 1.0, stalled=True),
        Failure(late, 0, ERROR, None, 1.0, stalled=True),
    ]
    answers = [Settled.FAILED, Settled.SCHEDULED, Settled.REFUSED, Settled.LOST]
    assert await settle.fail(database, worker_id=WORKER, runs=runs) == answers
    found = [(job["failure_reason"], counters(job)) for job in (read_job(sql, run.id) for run in runs)]
    assert found == [
        ("attempts", (3, 2, 1)),
        (None, (3, 1, 2)),
        (None, (3, 1, 1)),
        (None, (3, 1, 1)),
    ]


async def test_behind_a_lock_it_is_written_alone(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    values = settle.fail.values(WORKER, [Failure(job_id, 1, ERROR, None, 1.0, stalled=True)])
    (row,) = await database.run(settle.fail.alone, values)
    assert (row.status, counters(read_job(sql, job_id))) == ("scheduled", (1, 0, 1))
