"""What a child has begun is known when it is dead: read from memory that it shared with its parent."""

import os
import signal
from uuid import UUID, uuid4

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.supervisor.begun_jobs import BESIDES_SLOTS, BegunJobs
from jsworker.worker.pipeline import intake, slots
from tests.ownership.rows import Sql, counters, read_events, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import pid_of
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

SLOTS = 3
NAPS = 12


def shared(concurrency: int = SLOTS) -> tuple[BegunJobs, int]:
    with BegunJobs.shared(concurrency) as (parents, descriptor):
        return parents, os.dup(descriptor)


def test_it_survives_the_kill_of_whoever_wrote_it() -> None:
    parents, descriptor = shared()
    ids = [uuid4() for _ in range(3)]
    waits, again = uuid4(), uuid4()
    child = os.fork()
    if not child:
        begun = BegunJobs.take_over(descriptor)
        for job_id in [*ids, waits, again]:
            begun.add(job_id)
        begun.remove(ids[1])
        begun.remove(uuid4())  # one that never began
        begun.forget(waits)
        begun.forget(again)
        begun.add(again)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(descriptor)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert set(parents.read() or ()) == {ids[0], ids[2], again}
    assert parents.ended == 1


def test_a_job_is_forgotten_before_its_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed between the two leaves no job among the culprits whose outcome is written."""
    parents, descriptor = shared()
    begun = BegunJobs.take_over(descriptor)
    job_id = uuid4()
    begun.add(job_id)
    counted = begun._memory
    seen: list[tuple[UUID, ...] | None] = []

    class Memory:
        def __setitem__(self, place: slice, value: bytes) -> None:
            seen.append(parents.read())
            counted[place] = value

    monkeypatch.setattr(begun, "_memory", Memory())
    begun.remove(job_id)
    assert (seen, parents.read(), parents.ended) == ([(job_id,), ()], (), 1)


def test_nothing_is_known_of_a_child_that_does_not_note_what_it_begins() -> None:
    parents, descriptor = shared()
    assert parents.read() is None
    BegunJobs.take_over(descriptor)
    assert parents.read() == ()


def test_without_a_place_for_all_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jsworker.supervisor.begun_jobs.BESIDES_SLOTS", 0)
    parents, descriptor = shared()
    begun = BegunJobs.take_over(descriptor)
    ids = [uuid4() for _ in range(SLOTS + 2)]
    for job_id in ids:
        begun.add(job_id)
    assert parents.read() is None
    for job_id in ids:
        begun.remove(job_id)
    assert parents.read() is None


@pytest.mark.parametrize("processes", [1, 2])
async def test_jobs_that_waited_for_a_slot_of_a_killed_child_have_no_stall(
    processes: int, supervise: Supervise, settings: Settings, client: JobClient, sql: Sql
) -> None:
    """With a sibling, which takes the jobs back, and without one, when the parent does."""
    parent = supervise(
        "Nap",
        processes=processes,
        concurrency=SLOTS,
        heartbeat_interval=10.0,  # for so long they may wait for a slot
        statement_timeout=5.0,
        crash_threshold="none",
        stale_threshold=60.0,
        ack_wait=120.0,
    )
    await parent.ready(processes)
    # Short runs first, so that the children claim ahead.
    short = await client.enqueue_many("nap", [{"seconds": 0.001}] * 40 * processes)
    for job in short:
        await ends(sql, job.id)
    naps = [job.id for job in await client.enqueue_many("nap", [{"seconds": 3600}] * NAPS * processes)]

    async def one_holds_more_than_it_can_run() -> tuple[str, set[UUID], set[UUID]]:
        rows = [job for job in (read_job(sql, each) for each in naps) if job["status"] == "processing"]
        for owner in {job["worker_id"] for job in rows}:
            mine = [job for job in rows if job["worker_id"] == owner]
            begun = {job["id"] for job in mine if job["stage"] == "asleep"}
            if len(begun) == SLOTS and len(mine) > SLOTS:
                return owner, begun, {job["id"] for job in mine} - begun
        raise AssertionError(rows)

    owner, begun, waiting = await eventually(one_holds_more_than_it_can_run)
    for nap in (read_job(sql, each) for each in naps):
        if nap["worker_id"] != owner and nap["stage"] != "asleep":  # it would take a slot of the next child
            await client.cancel(nap["id"])
    parent.send(signal.SIGKILL, await pid_of(parent, owner))
    for job_id in begun:
        assert counters(await ends(sql, job_id)) == (2, 0, 1)
    for job_id in waiting:
        resets = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
        assert [event["detail"]["counted"] for event in resets] == [False]
        assert read_job(sql, job_id)["stalls"] == 0
    assert settings.max_stalls > 1
    if processes > 1:

        async def told() -> None:
            lines = [line for line in parent.lines("stale.recovered") if line["owners"] == [owner]]
            assert sum(line["jobs"] for line in lines) == len(begun | waiting)
            assert sum(line["counted"] for line in lines) == SLOTS

        await eventually(told)
        assert parent.lines("job.stalled") == []


async def ends(sql: Sql, job_id: UUID) -> dict[str, object]:
    async def completed() -> dict[str, object]:
        job = read_job(sql, job_id)
        assert job["status"] == "completed", job
        return job

    return await eventually(completed)


def test_there_is_a_place_for_all_that_can_have_begun_while_the_database_is_behind() -> None:
    assert slots.SETTLING_JOBS + slots.MOST_PREFETCH_JOBS + intake.MOST_AT_ONCE <= BESIDES_SLOTS
