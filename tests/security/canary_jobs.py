"""Processors that come across secrets; copied to where ``run`` imports it."""

import os
from typing import Any

import psycopg
from pydantic import BaseModel
from sqlalchemy import text

from jsworker import Job, JobProcessor

KEEP = text("INSERT INTO public.canary (secret) VALUES (:secret)")


class Card(BaseModel):
    number: int


class Keeps(JobProcessor):
    """Holds secrets in every place that a job has for data."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        await job.save_checkpoint({"kept": os.environ["CANARY_CHECKPOINT"]})
        return {"found": os.environ["CANARY_RESULT"]}


class Violates(JobProcessor):
    """PostgreSQL answers with the whole row in its DETAIL."""

    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction() as session:
            await session.execute(KEEP, {"secret": job.payload["secret"]})


class ViolatesByHand(JobProcessor):
    """Likewise, over a connection of its own and in a thread."""

    max_attempts = 1

    def process(self, job: Job[dict[str, Any]]) -> None:
        with psycopg.connect(os.environ["CANARY_URL"]) as connection:
            connection.execute("INSERT INTO public.canary (secret) VALUES (%s)", [job.payload["secret"]])


class Strict(JobProcessor[Card]):
    """Gets a payload that does not fit."""

    async def process(self, job: Job[Card]) -> None:
        raise AssertionError(job.id)


class Unstorable(JobProcessor):
    """Returns what no JSON can hold."""

    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> Any:
        return {"secret": job.payload["secret"], "what": object()}


class Breaks(JobProcessor):
    """Fails in code whose variables hold a secret."""

    max_attempts = 1

    def process(self, job: Job[dict[str, Any]]) -> int:
        secret = job.payload["secret"]
        return int(len(secret) / (len(secret) - len(secret)))


class Tells(JobProcessor):
    """Puts a secret into its own exception: that text is stored and logged, as SECURITY.md says."""

    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        raise ValueError(os.environ["CANARY_EXCEPTION"])


class Crashes(JobProcessor):
    """Runs in quarantine from its first stall on, and takes its process down."""

    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        os.abort()
