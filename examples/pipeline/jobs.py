"""The jobs of the pipeline: each night one that starts a workflow, and the nodes of that."""

import asyncio
import json
import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jsworker import Cron, Fail, Job, JobClient, JobProcessor, Limit, Rate
from pipeline.logs import Counts, count

FOLDER = Path(os.environ.get("PIPELINE_FOLDER", "pipeline-data")).absolute()
"""Holds ``logs/DISK/NAME.log`` and ``subscribers.txt``; reports and letters are written there."""

CHUNK_BYTES = 64 * 1024
"""The count is saved after each chunk of a log: a later run of the job goes on behind that chunk."""


class LogFile(BaseModel):
    """The payload of ``count-log``: an absolute path, and the disk that it lies on."""

    path: str
    disk: str


class Saved(BaseModel):
    """The checkpoint of ``count-log``: what the first ``offset`` bytes add up to."""

    offset: int = 0
    counts: Counts = Counts()


class ReportOf(BaseModel):
    """The payload of nodes that read or write the report of a day."""

    folder: str
    day: date

    def file(self) -> Path:
        """Return where the report is."""
        return Path(self.folder) / "reports" / f"{self.day}.json"


class Letter(ReportOf):
    """The payload of ``send-letter``."""

    subscriber: str


class NightlyReport(JobProcessor):
    """Starts the workflow of a night, once; its result is the workflow's id.

    Schedule: any worker fires it, once for each due time. ``overlap="skip"``: not while the last one runs.
    """

    kind = "nightly-report"
    schedule = Cron("10 0 * * *", tz="Europe/Berlin", payload={"folder": str(FOLDER)}, overlap="skip")

    async def setup(self) -> None:
        """Open the client by which the workflow is enqueued."""
        self._client = JobClient.from_env()
        await self._client.open()

    async def teardown(self) -> None:
        """Close it."""
        await self._client.close()

    async def process(self, job: Job[dict[str, Any]]) -> str:
        """Start the workflow in a step: a later run of the job returns the stored result of the step."""
        day = (job.scheduled_for or datetime.now(UTC)).date()
        return await job.step("start", self._start, Path(job.payload["folder"]), day)

    async def _start(self, folder: Path, day: date) -> str:
        logs, subscribers = await asyncio.to_thread(_look_into, folder)
        if not logs:
            raise Fail(f"folder {folder} has no logs/DISK/NAME.log")
        report = ReportOf(folder=str(folder), day=day)
        async with self._client.workflow(f"report of {day}") as flow:
            parts = flow.batch(
                CountLog, [LogFile(path=str(log), disk=log.parent.name) for log in logs], name="logs"
            )
            summary = flow.job(WriteReport, report, after=[parts], name="report")
            letters = [Letter(subscriber=name, **report.model_dump()) for name in subscribers]
            if letters:
                flow.batch(SendLetter, letters, after=[summary], name="letters")
        return str(flow.id)


def _look_into(folder: Path) -> tuple[list[Path], list[str]]:
    return sorted(folder.glob("logs/*/*.log")), (folder / "subscribers.txt").read_text().split()


class CountLog(JobProcessor[LogFile]):
    """Counts one log, which keeps a CPU busy: in a process of its own, it holds up no other job.

    Limit: at most two of each disk run at once, on all workers together.
    """

    kind = "count-log"
    limit = Limit(2, key="disk")
    timeout = 3600.0
    isolation = "process"

    def process(self, job: Job[LogFile]) -> dict[str, Any]:
        """Return the counts of the log, and the offset at which this run began to read."""
        saved = Saved.model_validate(job.checkpoint or {})
        begun_at, path = saved.offset, Path(job.payload.path)
        size = path.stat().st_size
        with path.open("rb") as log:
            log.seek(saved.offset)
            while chunk := log.readlines(CHUNK_BYTES):
                saved.counts.add(count(chunk))
                saved.offset = log.tell()
                job.sync.save_checkpoint(saved.model_dump())
                job.sync.update_progress(stage=path.name, progress=min(1.0, saved.offset / size))
        return {**saved.counts.model_dump(), "begun_at": begun_at}


class WriteReport(JobProcessor[ReportOf]):
    """Adds up what the logs' jobs have returned, and writes the report."""

    kind = "write-report"

    async def process(self, job: Job[ReportOf]) -> dict[str, Any]:
        """Write and return the report; if a later run writes it again, it is the same."""
        total = Counts()
        async for part in job.results_of("logs"):
            total.add(Counts.model_validate(part.result))
        file = job.payload.file()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{job.id}")
        unfinished.write_text(total.model_dump_json(indent=2))
        unfinished.replace(file)
        return total.model_dump()


class SendLetter(JobProcessor[Letter]):
    """Sends the report to one subscriber; here, a letter is a file.

    Rate: the mail server takes twenty a second, from all workers together.
    """

    kind = "send-letter"
    rate = Rate(20, per=1)

    async def process(self, job: Job[Letter]) -> str:
        """Send it in a step: a later run of the job does not send it again."""
        return await job.step("send", self._send, job.payload)

    async def _send(self, letter: Letter) -> str:
        report = json.loads(letter.file().read_text())
        file = Path(letter.folder) / "letters" / f"{letter.day} {letter.subscriber}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Dear {letter.subscriber}: {report['requests']} requests on {letter.day}.\n")
        return file.name


PROCESSORS = (NightlyReport, CountLog, WriteReport, SendLetter)
