"""The kill, on real processes (that only sleep) and real rows."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from jsworker.demo.fleet import WorkerProcess
from jsworker.demo.victim import try_to_kill
from jsworker.ownership.database import Database
from tests.ownership.rows import Sql, change_job, insert_job


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    started = []
    for number in range(3):
        process = subprocess.Popen(["sleep", "300"])
        worker = WorkerProcess(f"worker-{number}", log=tmp_path / "log", process=process)
        worker.id = f"id-{number}"
        started.append(worker)
    yield started
    for worker in started:
        worker.close()


@pytest.fixture
def between_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Return a function that has something done between the first look and the second."""
    sleep = asyncio.sleep

    def arrange(step: Callable[[], None]) -> None:
        steps = [step]

        async def sleep_and_step(seconds: float) -> None:
            while steps:
                steps.pop()()
            await sleep(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep_and_step)

    return arrange


def all_are(state: str, workers: Sequence[WorkerProcess]) -> bool:
    """Tell whether all processes soon are in a state: a signal takes a moment to arrive."""
    give_up_at = time.monotonic() + 30.0
    while any(psutil.Process(worker.pid).status() != state for worker in workers):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)
    return True


async def test_the_worker_with_most_jobs_is_killed_and_the_others_go_on(
    sql: Sql, database: Database, workers: list[WorkerProcess]
) -> None:
    insert_job(sql, "processing", worker_id="id-0")
    held = {(insert_job(sql, "processing", worker_id="id-1", fencing_token=token), token) for token in (1, 4)}
    insert_job(sql, "queued")

    kill = await try_to_kill(workers, database)

    assert kill is not None
    assert kill.worker is workers[1]
    assert kill.held == held
    assert (kill.worker.killed, kill.worker.exit_code) == (True, -signal.SIGKILL)
    assert all_are("sleeping", [workers[0], workers[2]])


async def test_nobody_is_killed_who_holds_nothing(
    sql: Sql, database: Database, workers: list[WorkerProcess]
) -> None:
    insert_job(sql, "processing", worker_id="somebody-else")

    assert await try_to_kill(workers, database) is None
    assert all_are("sleeping", workers)


async def test_a_job_that_was_just_settled_saves_its_worker(
    sql: Sql,
    database: Database,
    workers: list[WorkerProcess],
    between_looks: Callable[[Callable[[], None]], None],
) -> None:
    job = insert_job(sql, "processing", worker_id="id-0")

    def settle() -> None:
        assert all_are("stopped", workers)
        sql.execute(
            "UPDATE jsworker.jobs SET status = 'completed', finished_at = now(), worker_id = NULL,"
            " last_activity_at = NULL WHERE id = %s",
            [job],
        )

    between_looks(settle)

    assert await try_to_kill(workers, database) is None
    assert all_are("sleeping", workers)


async def test_a_claim_on_its_way_is_waited_for(
    sql: Sql,
    database: Database,
    workers: list[WorkerProcess],
    between_looks: Callable[[Callable[[], None]], None],
) -> None:
    first = insert_job(sql, "processing", worker_id="id-0")
    second = insert_job(sql, "queued")
    between_looks(lambda: insert_job_for("id-0"))

    def insert_job_for(worker_id: str) -> None:
        claim = {"status": "processing", "worker_id": worker_id, "fencing_token": 1, "attempts": 1}
        change_job(sql, second, **claim, last_activity_at="now", claimed_at="now")

    kill = await try_to_kill(workers, database)

    assert kill is not None
    assert kill.held == {(first, 1), (second, 1)}


async def test_workers_go_on_when_the_look_fails(database: Database, workers: list[WorkerProcess]) -> None:
    workers[0].id = "\0"  # which PostgreSQL refuses

    with pytest.raises(Exception, match="PostgreSQL refused"):
        await try_to_kill(workers, database)

    assert all_are("sleeping", workers)
