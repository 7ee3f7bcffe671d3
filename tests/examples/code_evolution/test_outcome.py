"""What the demo complains about when its figures or the rows are not as they must be."""

from uuid import UUID

import pytest

from code_evolution.outcome import Outcome, conclude
from code_evolution.watch import Watch

from .fake_client import START, FakeClient, kill, new_watch, new_worker, result_of


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


async def outcome_of(watch: Watch, *, kill_wanted: bool = False) -> Outcome:
    return conclude(watch, await watch.rows(), frozenset(await watch.resets()), kill_wanted=kill_wanted)


def kill_owner_of(watch: Watch, job_id: UUID) -> None:
    watch.kill = kill(new_worker(1), (job_id, 1))


async def test_all_is_well(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "completed", "completed", "processing")
    *_, last = watch.tasks
    kill_owner_of(watch, last)
    await watch.look()
    client.record(last, "reset", 1, seconds=1.5)
    client.record(last, "claimed", 2, seconds=2.25)
    done = {"status": "completed", "fencing_token": 2, "finished_at": START, "result": result_of("f" * 40)}
    client.jobs[last] |= done
    await watch.look()

    outcome = await outcome_of(watch, kill_wanted=True)

    assert (outcome.complaints, outcome.remarks) == ([], [])
    assert (outcome.jobs, outcome.completed, outcome.recovered, outcome.lost) == (4, 4, 1, 0)
    assert (outcome.recovery_seconds, outcome.recovered_job, outcome.seconds) == (2.25, last, 8.0)
    [lines] = outcome.repositories
    assert [each.commit for each in lines.samples] == [f"{n:040x}" for n in range(3)] + ["f" * 40]


async def test_a_row_that_vanished_is_lost(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "queued")
    del client.jobs[list(watch.tasks)[1]]
    await watch.look()

    outcome = await outcome_of(watch)

    assert outcome.lost == 1
    assert outcome.complaints == [
        "1 job without an outcome: nothing has moved for 60 s",
        "the rows do not agree with 2 jobs enqueued: 1 completed",
    ]


async def test_rows_that_changed_after_their_end_are_named(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "failed", last_error="no such object")
    await watch.look()
    client.jobs[list(watch.tasks)[1]] |= {"status": "queued", "finished_at": None}

    outcome = await outcome_of(watch)

    assert "the rows do not agree with 2 jobs enqueued: 1 completed, 1 queued" in outcome.complaints


async def test_failed_and_cancelled_jobs_are_named(client: FakeClient) -> None:
    watch = new_watch(client, "failed", "cancelled", last_error="no such\nobject")
    await watch.look()
    labels = {job_id: task.label for job_id, task in watch.tasks.items()}
    first, second = watch.tasks

    outcome = await outcome_of(watch)

    assert set(outcome.complaints) == {f"{labels[first]} failed: no such", f"{labels[second]} cancelled"}
    assert (outcome.failed, outcome.lost) == (1, 0)


async def test_a_kill_that_did_not_happen_is_named(client: FakeClient) -> None:
    watch = new_watch(client, "completed")
    await watch.look()

    outcome = await outcome_of(watch, kill_wanted=True)

    assert outcome.complaints == ["no worker was caught while it owned a job, so none was killed"]


async def test_a_job_never_taken_from_the_killed_worker_is_named(client: FakeClient) -> None:
    watch = new_watch(client, "completed", "processing")
    kill_owner_of(watch, list(watch.tasks)[1])
    await watch.look()

    outcome = await outcome_of(watch, kill_wanted=True)

    assert outcome.complaints[1:] == [
        "1 job of the killed worker never taken back from it",
        "1 job of the killed worker never run again",
    ]


async def test_a_job_taken_from_a_living_worker_is_remarked_upon(client: FakeClient) -> None:
    watch = new_watch(client, "completed", fencing_token=2)
    client.record(next(iter(watch.tasks)), "reset", 1)
    await watch.look()

    outcome = await outcome_of(watch)

    assert outcome.complaints == []
    [remark] = outcome.remarks
    assert remark.startswith("1 job taken back from workers that lived")


async def test_a_run_without_any_move_is_given_up(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = new_watch(client, "processing")
    await watch.look()
    assert watch.moving

    monkeypatch.setattr("code_evolution.watch.STUCK_SECONDS", 0.0)
    client.jobs[next(iter(watch.tasks))]["last_activity_at"] = START  # a heartbeat is no move
    await watch.look()

    assert not watch.moving
