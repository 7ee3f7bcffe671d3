"""The main way: enqueue, claim, process, settle, acknowledge."""

import gc
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.worker import Worker
from tests.support.polling import eventually


class Numbers(BaseModel):
    values: list[int]


class AddUp(JobProcessor[Numbers]):
    def process(self, job: Job[Numbers]) -> dict[str, int]:
        job.sync.update_progress(stage="adding", progress=0.5)
        return {"sum": sum(job.payload.values)}


class Double(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> int:
        return 2 * int(job.payload["n"])


async def test_a_job_is_completed_with_its_result_and_its_message_is_gone(
    client: JobClient, settings: Settings
) -> None:
    async with Worker([AddUp, Double], settings) as worker:
        added = await client.enqueue(AddUp, Numbers(values=[1, 2, 3]))
        doubled = await client.enqueue("double", {"n": 21})

        async def both_completed() -> None:
            assert (await client.get(added.id)).status == "completed"
            assert (await client.get(doubled.id)).status == "completed"
            assert (await worker._stream.state()).messages == 0

        await eventually(both_completed)
    row = await client.get(added.id)
    assert row.result == {"sum": 6}
    assert (row.stage, row.progress, row.attempts, row.fencing_token) == ("adding", 0.5, 1, 1)
    assert (await client.get(doubled.id)).result == 42


async def test_many_jobs_are_completed_once_each(client: JobClient, settings: Settings) -> None:
    completed: list[str] = []
    worker = Worker([Double], settings)
    worker.on("job.completed", lambda event: completed.append(event.fields["job_id"]))
    enqueued = await client.enqueue_many("double", [{"n": n} for n in range(1000)])
    async with worker:

        async def all_completed() -> None:
            assert len(completed) == 1000

        await eventually(all_completed)
    assert sorted(completed) == sorted(str(one.id) for one in enqueued)


async def test_of_completed_jobs_nothing_is_left_to_the_garbage_collector(
    client: JobClient, settings: Settings
) -> None:
    """Circles of thousands of runs a second would take a third of the worker's time."""
    completed: list[str] = []

    def runs() -> int:
        return sum(type(each) is Run for each in gc.get_objects())

    async with Worker([AddUp, Double], settings) as worker:
        worker.on("job.completed", lambda event: completed.append(event.fields["job_id"]))
        gc.collect()
        before = runs()
        gc.disable()
        try:
            await client.enqueue_many("double", [{"n": n} for n in range(50)])
            await client.enqueue_many(AddUp, [Numbers(values=[n]) for n in range(5)])

            async def none_is_left() -> None:
                assert len(completed) == 55
                assert runs() == before

            await eventually(none_is_left)
        finally:
            gc.enable()


async def test_a_worker_that_stops_leaves_nothing_behind(
    client: JobClient, make_settings: Callable[..., Settings]
) -> None:
    worker = Worker([Double], make_settings())
    async with worker:
        pass
    assert await worker.close() == 0
