"""Jobs of functions, and results as the type that ``process`` returns, from one end to the other."""

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from jsworker import Job, JobClient, JobProcessor, job
from jsworker.core.errors import InvalidJson
from tests.worker.running import StartWorker

WITHIN = 60.0


class Text(BaseModel):
    text: str


class Day(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date


@dataclass
class Place:
    line: int


@job
async def count_words(text: Text) -> int:
    return len(text.text.split())


@job(max_attempts=1)
def places_of(job: Job[Text]) -> tuple[Place, ...]:
    job.sync.update_progress(stage="search")
    return tuple(Place(number) for number, _ in enumerate(job.payload.text.split("\n")))


class Plan(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Day] | None:
        if "day" not in job.payload:
            return None
        return {"start": Day(day=date.fromisoformat(job.payload["day"]))}


class Now(JobProcessor):
    def process(self, job: Job[dict[str, Any]]) -> datetime:  # noqa: ARG002 -- its time is another
        return datetime(2030, 1, 31, tzinfo=UTC)


class Untyped(JobProcessor):
    def process(self, job: Job[dict[str, Any]]):  # type: ignore[no-untyped-def]  # noqa: ANN201, ARG002 -- what is tested
        return {"at": datetime(2030, 1, 31, tzinfo=UTC)}


async def test_functions_work_like_classes(client: JobClient, start: StartWorker) -> None:
    await start(count_words, places_of)
    counted = await count_words.enqueue(Text(text="to be"), client=client, unique_key="a", delay=0.1)
    found = await client.enqueue(places_of, Text(text="a\nb"))
    assert await counted.result(WITHIN) == 2
    assert await found.result(WITHIN) == (Place(0), Place(1))
    assert (await client.get(counted.id)).unique_key == "a"
    assert (await client.get(found.id)).stage == "search"
    async with client.workflow("words") as flow:
        first = flow.batch(count_words, [Text(text="a"), Text(text="a b")])
        flow.job(places_of, Text(text=""), after=first)
    assert await flow.result(WITHIN) == [{"line": 0}]


async def test_results_are_of_the_type_that_process_returns(client: JobClient, start: StartWorker) -> None:
    await start(Plan, Now, Untyped)
    plan = await client.enqueue(Plan, {"day": "2030-01-31"})
    assert await plan.result(WITHIN) == {"start": Day(day=date(2030, 1, 31))}
    assert await client.result(plan.id) == {"start": {"day": "2030-01-31"}}
    assert await (await client.enqueue("plan", {"day": "2030-01-31"})).result(WITHIN) == {
        "start": {"day": "2030-01-31"}
    }
    assert await (await client.enqueue(Plan, {})).result(WITHIN) is None
    [now] = await client.enqueue_many(Now, [{}])
    assert await now.result(WITHIN) == datetime(2030, 1, 31, tzinfo=UTC)
    assert await (await client.enqueue(Untyped, {})).result(WITHIN) == {"at": "2030-01-31T00:00:00Z"}


@job(kind="plan")
def older_plan(payload: dict[str, Any]) -> Any:
    return {"start": {"day": payload["day"]}}


async def test_a_result_of_another_type_is_named_without_its_value(
    client: JobClient, start: StartWorker
) -> None:
    await start(older_plan)
    plan = await client.enqueue(Plan, {"day": "MARKER"})
    with pytest.raises(InvalidJson) as refusal:
        await plan.result(WITHIN)
    misfit = "its result does not fit the return type: start.day: Input should be a valid date"
    assert str(refusal.value).startswith(f"job {plan.id} of kind plan: {misfit}")
    assert "MARKER" not in str(refusal.value)
    assert (await client.result(plan.id)) == {"start": {"day": "MARKER"}}
