"""The kill, on real processes (that only sleep) and the rows that a client returns."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest

from code_evolution.run import try_to_kill
from code_evolution.workers import WorkerProcess

from .fake_client import FakeClient


@pytest.fixture
async def workers() -> AsyncIterator[list[WorkerProcess]]:
    started = [
        WorkerProcess(
            f"worker-{number}",
            Path("/dev/null"),
            await asyncio.create_subprocess_exec("sleep", "300"),
            f"id-{number}",
        )
        for number in range(3)
    ]
    yield started
    for worker in started:
        worker.send(signal.SIGKILL)
        await worker.process.wait()


def owned(worker_id: str, token: int = 1, job_id: UUID | None = None) -> Record:
    return Record(id=job_id or uuid4(), worker_id=worker_id, fencing_token=token, status="processing")


def client_that_answers(*answers: list[Record]) -> Any:
    client = FakeClient()
    client.answers = list(answers)
    return client


def all_are(state: str, workers: Sequence[WorkerProcess]) -> bool:
    """Return whether all processes soon are in a state: a signal takes a moment to arrive."""
    give_up_at = time.monotonic() + 30.0
    while any(psutil.Process(worker.process.pid).status() != state for worker in workers):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)
    return True


async def test_the_worker_with_most_jobs_is_killed_and_the_others_go_on(workers: list[WorkerProcess]) -> None:
    rows = [owned("id-0"), owned("id-1", 1), owned("id-1", 4), owned("id of another run")]

    kill = await try_to_kill(workers, client_that_answers(rows, rows))

    assert kill is not None
    assert kill.worker is workers[1]
    assert kill.held == {(row.id, row.fencing_token) for row in rows[1:3]}
    assert await workers[1].process.wait() == -signal.SIGKILL
    assert workers[1].state == "killed"
    assert all_are("sleeping", [workers[0], workers[2]])


async def test_a_worker_without_jobs_is_not_killed(workers: list[WorkerProcess]) -> None:
    assert await try_to_kill(workers, client_that_answers([owned("id of another run")])) is None
    assert all_are("sleeping", workers)


async def test_a_worker_whose_job_was_just_settled_is_not_killed(workers: list[WorkerProcess]) -> None:
    class SettledAfterTheFirstLook(FakeClient):
        async def list(self, **filters: Any) -> Sequence[Record]:
            assert all_are("stopped", workers)
            return await super().list(**filters)

    client: Any = SettledAfterTheFirstLook()
    client.answers = [[owned("id-0")]]

    assert await try_to_kill(workers, client) is None
    assert all_are("sleeping", workers)


async def test_a_claim_on_its_way_is_waited_for(workers: list[WorkerProcess]) -> None:
    first, second = owned("id-0"), owned("id-0")
    both = [first, second]

    kill = await try_to_kill(workers, client_that_answers([first], both, both))

    assert kill is not None
    assert kill.held == {(first.id, 1), (second.id, 1)}


async def test_workers_go_on_when_the_look_fails(workers: list[WorkerProcess]) -> None:
    class Unreachable(FakeClient):
        async def list(self, **_: Any) -> Sequence[Record]:
            raise ConnectionError

    client: Any = Unreachable()
    with pytest.raises(ConnectionError):
        await try_to_kill(workers, client)

    assert all_are("sleeping", workers)
