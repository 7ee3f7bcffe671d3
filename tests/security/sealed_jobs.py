"""Processors that come across encrypted secrets; copied to where ``run`` imports it."""

from typing import Any

from pydantic import BaseModel, field_validator

from jsworker import Fail, Job, JobProcessor, Retry


class Card(BaseModel):
    secret: str
    number: int

    @field_validator("number")
    @classmethod
    def _check(cls, number: int) -> int:
        raise ValueError(f"{number} is a number that is told")


class Keeps(JobProcessor):
    """Holds secrets in every place that a job has for data, in two runs."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        secret = job.payload["secret"]
        await job.save_checkpoint({"kept": secret})
        found = await job.step("first", self.echo, secret)
        if job.attempt == 1:
            raise Retry(0, secret)
        return {"found": found}

    async def echo(self, secret: str) -> str:
        return secret


class Raises(JobProcessor):
    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        raise ValueError(job.payload["secret"])


class Fails(JobProcessor):
    def process(self, job: Job[dict[str, Any]]) -> None:
        raise Fail(job.payload["secret"])


class Strict(JobProcessor[Card]):
    async def process(self, job: Job[Card]) -> None:
        raise AssertionError(job.id)


class Alone(JobProcessor):
    """Runs in a process of its own."""

    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.save_checkpoint(job.payload)
        raise Fail(job.payload["secret"])
