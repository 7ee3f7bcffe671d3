"""A worker tells plain subscribers what becomes of its jobs, if it is asked to."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import nats
from nats.aio.msg import Msg

from jsworker import Fail, JobClient, Retry
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

CANARY = "c4n4ry"


async def several(job: Job[Any]) -> Any:
    match job.payload["how"]:
        case "fails":
            raise Fail(CANARY)
        case "is retried" if job.attempt == 1:
            raise Retry(0, CANARY)
        case "waits":
            await job.update_progress(CANARY, 0.5, CANARY)
            while not job.cancelled:  # noqa: ASYNC110 -- a processor has no other way to learn it
                await asyncio.sleep(0.02)
    return {"result": CANARY}


async def test_what_becomes_of_jobs_is_told(
    make_settings: Callable[..., Settings], client: JobClient, rows: Rows, start: StartWorker
) -> None:
    settings = make_settings(publish_events=True)
    connection = await nats.connect(settings.nats_url)
    messages: list[Msg] = []

    async def hear(message: Msg) -> None:
        messages.append(message)

    prefix = settings.subject_prefix
    await connection.subscribe(f"{prefix}.events.>", cb=hear)
    await connection.flush()
    running = await start(scripted(several), with_settings=settings)
    jobs = {
        how: await client.enqueue(KIND, {"how": how}) for how in ("is done", "fails", "is retried", "waits")
    }
    await running.events.told("job.progress")
    await client.cancel(jobs["waits"].id)
    expected = {
        "is done": ["completed"],
        "fails": ["failed"],
        "is retried": ["retried", "completed"],
        "waits": ["progress", "cancelled"],
    }

    async def all_told() -> None:
        told: dict[str, list[str]] = {}
        for message in messages:
            content = json.loads(message.data)
            assert message.subject == f"{prefix}.events.{KIND}.{content['event']}"
            told.setdefault(content["job_id"], []).append(content["event"])
        assert told == {str(jobs[how].id): words for how, words in expected.items()}

    await eventually(all_told)
    assert CANARY not in str([message.data for message in messages])
    status = running.worker.status()
    assert status is not None
    assert status.events_dropped == 0
    await running.stream_is_empty()
    await connection.close()


async def test_unless_it_is_asked_to_nothing_is_told(
    settings: Settings, client: JobClient, rows: Rows, start: StartWorker
) -> None:
    connection = await nats.connect(settings.nats_url)
    listening = await connection.subscribe(f"{settings.subject_prefix}.events.>")
    await connection.flush()
    await start(scripted(echo))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    await connection.flush()
    assert listening.pending_msgs == 0
    await connection.close()
