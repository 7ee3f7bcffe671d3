"""What mypy --strict and pyright must refuse: each line that ends in ``# error``, and no other."""

from uuid import UUID

from jsworker import (
    Event,
    Job,
    JobClient,
    JobEvent,
    JobProcessor,
    SyncJobClient,
    Worker,
    enqueue_statement,
    job,
)
from jsworker.contrib import django
from jsworker.testing import run_job, sync
from tests.typing.right_uses import (
    CountLines,
    CountWords,
    OtherText,
    Text,
    TidyUp,
    count_letters,
    count_pages,
)


class NoProcessor:
    def process(self, job: Job[Text]) -> int:
        return len(job.payload.text)


async def enqueueing(client: JobClient) -> None:
    text = Text(text="")
    await client.enqueue(CountWords, OtherText(text=""))  # error
    await client.enqueue(CountWords, {"text": ""})  # error
    await client.enqueue(CountWords, [text])  # error
    await client.enqueue(CountWords, None)  # error
    await client.enqueue(CountLines, "text")  # error
    await client.enqueue(TidyUp, text)  # error
    await client.enqueue(CountWords)  # error
    await client.enqueue(CountWords(), text)  # error
    await client.enqueue(NoProcessor, text)  # error
    await client.enqueue(Text, text)  # error
    await client.enqueue(7, text)  # error
    await client.enqueue(CountWords, text, unique_key=7)  # error
    await client.enqueue(CountWords, text, delai=60)  # error
    await client.enqueue(CountWords, text, delay="60")  # error
    await client.enqueue("count-words", {}, priority="urgent")  # error
    await client.enqueue_many(CountWords, [OtherText(text="")])  # error
    await client.enqueue_many(CountWords, [text, {"text": ""}])  # error
    await client.enqueue_many(CountLines, text)  # error
    await client.enqueue_many(CountWords, [text], unique_keys=[7])  # error
    enqueue_statement(CountWords, OtherText(text=""))  # error
    enqueue_statement(NoProcessor, text)  # error


def in_django() -> None:
    django.enqueue(CountWords, OtherText(text=""))  # error
    django.enqueue(CountWords, {"text": ""})  # error
    django.enqueue(NoProcessor, Text(text=""))  # error
    django.enqueue(CountWords, Text(text=""), delai=60)  # error


async def testing() -> None:
    await run_job(CountWords, 7)  # error
    await run_job(CountWords(), OtherText(text=""))  # error
    await run_job(NoProcessor, Text(text=""))  # error
    sync.run_job(CountLines, "text")  # error


async def results(client: JobClient) -> int:
    handle = await client.enqueue(CountWords, Text(text=""))
    (await handle.result()).lines  # error
    await handle.result(timeout="60")  # error
    return await handle.result()  # error


def waiting(client: SyncJobClient) -> int:
    client.enqueue(CountWords, OtherText(text=""))  # error
    client.enqueue_many(CountWords, Text(text=""))  # error
    client.workflow("nightly").job(CountWords, OtherText(text=""))  # error
    count_pages.enqueue(OtherText(text=""), client=client)  # error
    return client.enqueue(CountWords, Text(text="")).result()  # error


async def children(given: Job[Text]) -> None:
    await given.enqueue(CountWords, OtherText(text=""))  # error
    await given.enqueue_many(CountWords, given.payload)  # error
    given.sync.enqueue(CountWords, {"text": ""})  # error
    given.sync.enqueue_many(CountWords, [{"text": ""}])  # error


async def workflows(client: JobClient) -> None:
    async with client.workflow("nightly") as flow:
        flow.job(CountWords, OtherText(text=""))  # error
        flow.batch(CountLines, [OtherText(text="")])  # error
        flow.batch(CountLines, Text(text=""))  # error
        flow.job(NoProcessor, Text(text=""))  # error


class Split(JobProcessor[Text]):
    async def process(self, job: Job[Text]) -> None:
        await job.add_to_batch(CountWords, [OtherText(text="")])  # error
        job.add_to_batch_statement(CountLines, [{"text": ""}])  # error
        job.sync.add_to_batch(TidyUp, [job.payload])  # error
        job.payload.pages  # error


async def functions(client: JobClient) -> int:
    await count_letters.enqueue(OtherText(text=""), client=client)  # error
    await count_pages.enqueue(Text(text=""), client=client)  # error
    await count_letters.enqueue(Text(text=""))  # error
    await count_letters.enqueue(Text(text=""), client=client, delai=60)  # error
    await client.enqueue(count_letters, OtherText(text=""))  # error
    await client.enqueue_many(count_letters, [{"text": ""}])  # error
    await count_letters.function(OtherText(text=""))  # error
    count_pages.function(Text(text=""))  # error
    job(max_attempt=3)  # error
    job(priority="urgent")  # error
    job(7)  # error
    return await (await client.enqueue(count_letters, Text(text=""))).result()  # error


class CountsLetters(JobProcessor[Text]):
    async def process(self, job: Job[OtherText]) -> int:  # error
        return len(job.payload.text)


async def reading(client: JobClient, job_id: UUID) -> None:
    found = await client.get(job_id)
    found.status = "queued"  # error
    found["status"]  # error
    found.statu  # error
    (await client.list())[0].payload  # error
    await client.list(status="done")  # error
    await client.list(priority="urgent")  # error
    JobEvent(found.created_at, "taken back", None, 1, None, None)  # error


def tell(event: Event) -> None:
    event.name = "job.done"  # error


def listening(worker: Worker, client: JobClient) -> None:
    worker.on("job.done", tell)  # error
    client.events.on("worker.degrade", tell)  # error
    worker.on("job.failed", tell(Event("job.failed")))  # error
