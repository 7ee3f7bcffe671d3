"""The jobs of a small shop, which a browser looks at; copied to where ``run`` imports it."""

import asyncio
from typing import Any

from pydantic import BaseModel, Field

from jsworker import Cron, Every, Job, JobProcessor, Limit


class Order(BaseModel):
    """An order of a customer."""

    number: int = Field(ge=1)
    customer: str = "ann"
    is_express: bool = False


class SendInvoice(JobProcessor[Order]):
    async def process(self, job: Job[Order]) -> dict[str, Any]:
        await asyncio.sleep(0.02 + 0.11 * (job.payload.number % 7))
        return {"invoice": job.payload.number + 1000}


class ChargeCard(JobProcessor[Order]):
    """Fails: the bank takes no card of these."""

    max_attempts = 1

    async def process(self, job: Job[Order]) -> None:
        if job.payload.number % 3:
            raise ConnectionError(f"bank.example did not answer for order {job.payload.number}")
        raise ValueError(f"the card of order {job.payload.number} is expired")


class EncodeVideo(JobProcessor[dict[str, Any]]):
    """Runs until it is taken back, and then for ``seconds``."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        await job.step("probe", self._probe)
        seconds = job.payload["seconds"] if job.cleared else job.payload.get("first_seconds", 3600)
        for tenth in range(10):
            await job.update_progress(
                progress=tenth / 10, stage="encoding", message=f"part {tenth + 1} of 10"
            )
            await job.save_checkpoint({"part": tenth})
            await asyncio.sleep(seconds / 10)
        return {"file": "holidays.webm", "parts": 10}

    async def _probe(self) -> dict[str, Any]:
        return {"codec": "av1", "frames": 4711}


class SyncTenant(JobProcessor[dict[str, Any]]):
    """One of each tenant at a time."""

    limit = Limit(1, key="tenant")

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await asyncio.sleep(job.payload["seconds"])


class ImportProducts(JobProcessor[dict[str, Any]]):
    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> int:
        await asyncio.sleep(0.05)
        if job.payload.get("is_broken"):
            raise KeyError("price")
        return 40


class PublishCatalogue(JobProcessor[dict[str, Any]]):
    async def process(self, _job: Job[dict[str, Any]]) -> str:
        return "catalogue.json"


class NightlyReport(JobProcessor[dict[str, Any]]):
    schedule = Cron("10 3 * * *", tz="Europe/Berlin")

    async def process(self, _job: Job[dict[str, Any]]) -> str:
        return "report.pdf"


class CleanUp(JobProcessor[dict[str, Any]]):
    schedule = Every(seconds=3600)

    async def process(self, _job: Job[dict[str, Any]]) -> None: ...
