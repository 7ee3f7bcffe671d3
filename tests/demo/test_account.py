"""What the demo says when its figures or the rows are not as they must be."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Json

from jsworker.demo.account import draw_up
from jsworker.demo.fleet import WorkerProcess
from jsworker.demo.victim import Kill, try_to_kill
from jsworker.demo.watch import Watch
from jsworker.demo.work import read_projects, tasks_of
from jsworker.ownership.database import Database
from tests.ownership.rows import Sql, change_job, delete_rows, insert_job

from .repositories import commit, new_repository


@pytest.fixture
def watch(database: Database, tmp_path: Path) -> Watch:
    folder = new_repository(tmp_path / "project")
    for number in range(4):
        commit(folder, {"a.py": b"a = 1\n" * number})
    return Watch(database, read_projects([folder]))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("worker-1", log=tmp_path / "log", process=subprocess.Popen(["sleep", "300"]))
    worker.id = "demo-worker-1"
    yield worker
    worker.close()


def result_of(watch: Watch, place: int) -> Json:
    payload = tasks_of(watch.projects)[place].payload
    return Json({"date": payload.date.isoformat(), "commit": payload.commit, "lines": {}, "pid": 1})


def insert_jobs(sql: Sql, watch: Watch, *states: str, **columns: Any) -> list[UUID]:
    """Insert one job for each state, completed ones with their result, and have them followed."""
    ids = [
        insert_job(
            sql, state, **columns, **({"result": result_of(watch, place)} if state == "completed" else {})
        )
        for place, state in enumerate(states)
    ]
    watch.follow(dict(zip(ids, tasks_of(watch.projects), strict=False)))
    return ids


def tell(sql: Sql, job: UUID, event: str, token: int) -> None:
    sql.execute(
        "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token)"
        " VALUES (%s, %s, 'demo-worker-2', %s)",
        [job, event, token],
    )


async def killed(victim: WorkerProcess, database: Database, watch: Watch) -> Kill:
    kill = await try_to_kill([victim], database)
    assert kill is not None
    watch.follow_kill(kill)
    return kill


async def test_all_is_well(sql: Sql, database: Database, watch: Watch, victim: WorkerProcess) -> None:
    ids = insert_jobs(sql, watch, "completed", "completed", "completed", "processing")
    change_job(sql, ids[3], worker_id=victim.id)
    await killed(victim, database, watch)
    tell(sql, ids[3], "reset", 1)
    tell(sql, ids[3], "claimed", 2)
    sql.execute(
        "UPDATE jsworker.jobs SET status = 'completed', fencing_token = 2, worker_id = NULL,"
        " last_activity_at = NULL, finished_at = clock_timestamp(), result = %s WHERE id = %s",
        [result_of(watch, 3), ids[3]],
    )
    await watch.look()

    account = await draw_up(watch, database, kill_wanted=True)

    assert (account.complaints, account.remarks) == ([], [])
    outcome = account.outcome
    assert (outcome.jobs, outcome.completed, outcome.recovered, outcome.lost) == (4, 4, 1, 0)
    assert outcome.recovery_seconds is not None
    assert 0 < outcome.recovery_seconds < 10
    assert account.recovered_job == ids[3]
    [lines] = outcome.repositories
    assert [each.commit for each in lines.samples] == [each.id for each in watch.projects[0].commits]


async def test_a_row_that_vanished_is_lost(sql: Sql, database: Database, watch: Watch) -> None:
    insert_jobs(sql, watch, "completed", "queued")
    delete_rows(sql, "jobs", "status = 'queued'")
    await watch.look()

    account = await draw_up(watch, database, kill_wanted=False)

    assert account.outcome.lost == 1
    assert account.complaints == [
        "1 job without an outcome: nothing has moved for 60 s",
        "the rows do not agree with 2 jobs enqueued: 1 completed",
    ]


async def test_rows_that_changed_after_their_end_are_told(sql: Sql, database: Database, watch: Watch) -> None:
    ids = insert_jobs(sql, watch, "completed", "failed")
    await watch.look()
    retried = {"status": "queued", "queued_at": "now", "publish_after": "now", "finished_at": None}
    change_job(sql, ids[1], attempts=0, errors=0, **retried)

    account = await draw_up(watch, database, kill_wanted=False)

    assert "the rows do not agree with 2 jobs enqueued: 1 completed, 1 queued" in account.complaints


async def test_failed_and_cancelled_jobs_are_named(sql: Sql, database: Database, watch: Watch) -> None:
    insert_jobs(sql, watch, "failed", "cancelled", last_error="no such\nobject")
    await watch.look()
    labels = [task.label for task in watch.tasks.values()]

    account = await draw_up(watch, database, kill_wanted=False)

    assert account.complaints == [f"{labels[0]} failed: no such", f"{labels[1]} cancelled"]
    assert (account.outcome.failed, account.outcome.lost) == (1, 0)


async def test_a_kill_that_did_not_happen_is_told(sql: Sql, database: Database, watch: Watch) -> None:
    insert_jobs(sql, watch, "completed")
    await watch.look()

    account = await draw_up(watch, database, kill_wanted=True)

    assert account.complaints == ["no worker was caught with a job in its hands, so none was killed"]


async def test_a_job_never_taken_from_the_killed_worker_is_told(
    sql: Sql, database: Database, watch: Watch, victim: WorkerProcess
) -> None:
    ids = insert_jobs(sql, watch, "completed", "processing")
    change_job(sql, ids[1], worker_id=victim.id)
    await killed(victim, database, watch)
    await watch.look()

    account = await draw_up(watch, database, kill_wanted=True)

    assert account.complaints[1:] == [
        "1 job of the killed worker never taken back from it",
        "1 job of the killed worker never run again",
    ]


async def test_a_job_taken_from_a_living_worker_is_remarked_upon(
    sql: Sql, database: Database, watch: Watch
) -> None:
    ids = insert_jobs(sql, watch, "completed")
    tell(sql, ids[0], "reset", 1)
    await watch.look()

    account = await draw_up(watch, database, kill_wanted=False)

    assert account.complaints == []
    [remark] = account.remarks
    assert remark.startswith("1 job taken back from workers that lived")
