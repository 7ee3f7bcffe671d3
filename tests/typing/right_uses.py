"""What mypy --strict and pyright must let pass, with the types that they must find. Nothing here is run."""

from datetime import datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

from pydantic import BaseModel

from jsworker import (
    Event,
    EventName,
    Job,
    JobClient,
    JobDetails,
    JobEvent,
    JobHandle,
    JobInfo,
    JobProcessor,
    Limit,
    Settings,
    StepInfo,
    SyncJobClient,
    SyncJobHandle,
    Worker,
    enqueue_statement,
    job,
)
from jsworker.client.job_info import JobEventName
from jsworker.contrib import django
from jsworker.ownership.transitions.enqueue import Enqueued
from jsworker.testing import JobRun, run_job, sync


class Text(BaseModel):
    text: str


class LongText(Text):
    pages: int = 1


class OtherText(BaseModel):
    text: str


class Counts(BaseModel):
    words: int


class CountWords(JobProcessor[Text]):
    kind = "count-words"
    max_attempts = 5

    async def process(self, job: Job[Text]) -> Counts:
        return Counts(words=len(job.payload.text.split()))


class CountLines(JobProcessor[Text]):
    def process(self, job: Job[Text]) -> dict[str, int]:
        job.sync.add_to_batch(CountWords, [job.payload])
        return {"lines": job.payload.text.count("\n")}


class CountWordsTwice(CountWords):
    pass


class TidyUp(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.add_to_batch(CountWords, [Text(text="")])
        job.add_to_batch_statement("count-words", [{"text": ""}, {}])


class Translate(JobProcessor[Text | None]):
    async def process(self, job: Job[Text | None]) -> list[str]:
        return [] if job.payload is None else [job.payload.text]


@job
async def count_letters(text: Text) -> Counts:
    return Counts(words=len(text.text))


@job(kind="pages", max_attempts=3, timeout=None, limit=Limit(2), schedule=None, priority="low")
def count_pages(job: Job[LongText]) -> int:
    return job.payload.pages


@job()
async def sleep(payload: dict[str, Any]) -> None:
    assert payload


async def functions(client: JobClient, settings: Settings, run: Job[LongText]) -> None:
    text = LongText(text="to be")
    assert_type(await count_letters.enqueue(text, client=client), JobHandle[Counts])
    assert_type(await count_pages.enqueue(text, client=client, unique_key="a", delay=60), JobHandle[int])
    assert_type(await client.enqueue(count_letters, text), JobHandle[Counts])
    assert_type(await client.enqueue(count_pages, text), JobHandle[int])
    assert_type(await client.enqueue(sleep, {"seconds": 1}), JobHandle[None])
    assert_type(await client.enqueue_many(count_pages, [text]), list[JobHandle[int]])
    assert_type(await (await client.enqueue(count_letters, text)).result(), Counts)
    assert_type(await count_letters.function(text), Counts)
    assert_type(count_pages.function(run), int)
    async with client.workflow("nightly") as flow:
        flow.job(count_pages, text, after=flow.batch(count_letters, [text]))
    Worker([count_letters, count_pages, CountWords, CountLines()], settings)


async def enqueueing(
    client: JobClient, given: type[JobProcessor[Any]], known: type[JobProcessor[Text]]
) -> None:
    text = Text(text="to be")
    assert_type(await client.enqueue(CountWords, text), JobHandle[Counts])
    assert_type(
        await client.enqueue(CountLines, text, unique_key="a", delay=timedelta(1)), JobHandle[dict[str, int]]
    )
    assert_type(await client.enqueue(CountWords, LongText(text="", pages=3)), JobHandle[Counts])
    assert_type(await client.enqueue(CountWordsTwice, text, priority="high"), JobHandle[Counts])
    assert_type(await client.enqueue(TidyUp, {"since": 3}), JobHandle[None])
    assert_type(await client.enqueue(TidyUp, {}), JobHandle[None])
    assert_type(await client.enqueue(Translate, None), JobHandle[list[str]])
    assert_type(await client.enqueue("count-words", {"text": ""}), JobHandle)
    assert_type(await client.enqueue("count-words", {}), JobHandle)
    assert_type(await client.enqueue(given, 7), JobHandle)
    assert_type(await client.enqueue(known, text), JobHandle)
    assert_type(await client.enqueue_many(CountWords, [text, text]), list[JobHandle[Counts]])
    assert_type(
        await client.enqueue_many(CountLines, (Text(text=each) for each in "ab")),
        list[JobHandle[dict[str, int]]],
    )
    assert_type(await client.enqueue_many("count-words", [{}], unique_keys=["a"]), list[JobHandle])
    enqueue_statement(CountWords, text, delay=60)
    enqueue_statement("count-words", {})


def in_django(given: type[JobProcessor[Any]]) -> None:
    text = Text(text="to be")
    assert_type(django.enqueue(CountWords, text, unique_key="a", using="jobs", delay=60), Enqueued)
    django.enqueue(TidyUp, {"since": 3})
    django.enqueue(count_letters, text)
    django.enqueue("count-words", {"text": ""})
    django.enqueue(given, 7)


async def testing(given: type[JobProcessor[Any]]) -> None:
    text = Text(text="to be")
    assert_type(await run_job(CountWords, text, attempt=2), JobRun)
    await run_job(CountWords(), {"text": ""})
    await run_job(TidyUp, {})
    await run_job(Translate, None)
    await run_job(count_letters, LongText(text=""))
    await run_job(given, 7)
    assert_type(sync.run_job(CountLines, text), JobRun)


async def results(client: JobClient) -> None:
    handle = await client.enqueue(CountWords, Text(text=""))
    assert_type(handle.id, UUID)
    assert_type(await handle.result(timeout=60), Counts)
    assert_type(await client.result(handle.id), Any)
    several: list[JobHandle] = [handle]
    several += await client.enqueue_many("count-words", [{"text": ""}])


def waiting(client: SyncJobClient) -> None:
    text = Text(text="")
    assert_type(client.enqueue(CountWords, text, delay=60), SyncJobHandle[Counts])
    assert_type(client.enqueue(CountLines, text), SyncJobHandle[dict[str, int]])
    assert_type(client.enqueue("count-words", {}).result(), Any)
    assert_type(client.enqueue_many(CountWords, [text])[0].result(timeout=60), Counts)
    assert_type(count_letters.enqueue(text, client=client), SyncJobHandle[Counts])
    assert_type(client.get("id"), JobDetails)
    with client.workflow("nightly") as flow:
        flow.job("report", {}, after=flow.batch(CountLines, [text]))


async def children(given: Job[Text]) -> None:
    assert_type(await given.enqueue(CountWords, given.payload, unique_key="a"), UUID)
    assert_type(await given.enqueue_many("count-words", [{}]), list[UUID])
    assert_type(given.sync.enqueue(CountLines, given.payload), UUID)
    assert_type(given.sync.enqueue_many(CountLines, [given.payload]), list[UUID])


async def workflows(client: JobClient) -> None:
    async with client.workflow("nightly") as flow:
        lines = flow.batch(CountLines, [Text(text="")], max_attempts=3)
        words = flow.job(CountWords, Text(text=""), after=lines)
        flow.job("report", {}, after=[lines, words], on_failure="run")


async def reading(client: JobClient, job_id: UUID) -> None:
    found = await client.get(job_id)
    assert_type(found, JobDetails)
    assert_type(found.finished_at, datetime | None)
    assert_type(await client.list(status="failed", priority="low"), list[JobInfo])
    assert_type(await client.timeline(job_id), list[JobEvent])
    assert_type((await client.timeline(job_id))[0].event, JobEventName)
    assert_type(await client.steps(job_id), list[StepInfo])
    assert_type(found.to_dict(), dict[str, Any])
    known: JobInfo = found
    assert_type(known.kind, str)


def listening(worker: Worker, client: JobClient) -> None:
    def tell(event: Event) -> None:
        assert_type(event.name, EventName)

    worker.on("job.failed", tell)
    worker.on("*", tell)
    client.events.on("worker.degraded", tell)
