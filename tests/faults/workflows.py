"""``python -m tests.faults.workflows``: workflows under kills; each batch must finish, and once."""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy import text

from jsworker import Fail, JobClient, JobProcessor
from jsworker.core.settings import Settings
from jsworker.embedded import EmbeddedServers, start_with_parent
from jsworker.ownership.upgrading import upgrade_database
from tests.faults.fleet import ROOT, plain_environment
from tests.faults.report import close_run
from tests.faults.schedules import settings_of
from tests.support.polling import eventually

WORKERS = 3
MEMBERS = 50
_FAIL_EVERY = 400

# What must never be: A3 and L6 as SQL, when nothing moves any more.
BROKEN = {
    "batches not finished": "SELECT count(*) FROM jsworker.batches WHERE finished_at IS NULL",
    "finished with a live member": """SELECT count(*) FROM jsworker.batches AS b
      WHERE finished_at IS NOT NULL AND EXISTS (
        SELECT FROM jsworker.jobs AS j
        WHERE j.batch_id = b.id AND j.status IN ('scheduled', 'queued', 'processing'))""",
    "finished before its last member": """SELECT count(*) FROM jsworker.batches AS b WHERE finished_at < (
      SELECT max(j.finished_at) FROM jsworker.jobs AS j WHERE j.batch_id = b.id)""",
    "not propagated": "SELECT count(*) FROM jsworker.batches WHERE finished_at < now() AND NOT propagated",
    "held for ever": "SELECT count(*) FROM jsworker.jobs WHERE held_by = 'needs' AND status = 'scheduled'",
    "ran before its needs": """SELECT count(*) FROM jsworker.jobs AS j
      JOIN jsworker.batch_needs AS n ON n.batch = j.batch_id
      JOIN jsworker.batches AS b ON b.id = n.needs WHERE j.started_at < b.finished_at""",
    "wrongly cancelled": """SELECT count(*) FROM jsworker.jobs AS j
      WHERE j.status = 'cancelled' AND NOT EXISTS (
      SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
      WHERE n.batch = j.batch_id AND b.outcome <> 'completed')""",
    "last node not run": "SELECT count(*) FROM jsworker.jobs WHERE kind = 'last' AND status <> 'completed'",
    "workflows not finished": "SELECT count(*) FROM jsworker.workflows WHERE finished_at IS NULL",
}


class Part(JobProcessor):
    """Takes a moment; one in some hundred fails for good."""

    async def process(self, job: Any) -> int:
        """Return its number."""
        await asyncio.sleep(0.005)
        if random.randrange(_FAIL_EVERY) == 0:  # noqa: S311 -- which one fails
            raise Fail("one in some hundred")
        return int(job.payload["n"])


class Stage(Part):
    """The same, in the second stage."""


class Last(JobProcessor):
    """The last node of a workflow, which runs whatever became of the others."""

    async def process(self, job: Any) -> int:
        """Return how many members the stage before had."""
        return len([each async for each in job.results_of("stage")])


def start(environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a parent with one worker in a session of its own."""
    targets = [f"tests.faults.workflows:{each.__name__}" for each in (Part, Stage, Last)]
    with log.open("ab") as output:
        return start_with_parent(
            [sys.executable, "-m", "jsworker", "run", *targets],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            death_signal=signal.SIGKILL,
        )


async def enqueue(client: JobClient) -> None:
    """Enqueue a workflow of three stages."""
    async with client.workflow("three stages") as flow:
        flow.batch(Part, [{"n": number} for number in range(MEMBERS)], name="parts")
        flow.batch(Stage, [{"n": number} for number in range(MEMBERS)], name="stage", after="parts")
        flow.job(Last, {}, after="stage", on_failure="run")


async def under_kills(
    environment: dict[str, str], folder: Path, *, seconds: float, every: float, workflows: int
) -> dict[str, Any]:
    """Kill one of three workers, parent and child, every few seconds, as workflows come; judge the rows."""
    environment = environment | {"JSWORKER_LOG_LEVEL": "DEBUG", "JSWORKER_LOG_FORMAT": "json"}
    logs = [folder / f"{number}.log" for number in range(WORKERS)]
    alive = [start(environment, log) for log in logs]
    kills = enqueued = 0
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        async with JobClient(Settings(**settings_of(environment))) as client:
            while enqueued < workflows or clock() < began + seconds:
                while enqueued < workflows * min(1.0, (clock() - began) / seconds):
                    await enqueue(client)
                    enqueued += 1
                await asyncio.sleep(every)
                number = random.randrange(WORKERS)  # noqa: S311 -- who dies
                os.killpg(alive[number].pid, signal.SIGKILL)
                alive[number].wait()
                kills += 1
                alive[number] = start(environment, logs[number])
            found = await judged(client)
    finally:
        for process in alive:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = Counter(batch for log in logs for batch in finished_in(log))
    twice = sum(number > 1 for number in told.values())
    return {"kills": kills, "workflows": enqueued, "told": len(told), **found, "finished twice": twice}


async def judged(client: JobClient) -> dict[str, int]:
    """Wait until nothing of a workflow is open, and count what must not be."""

    async def count(statement: str) -> int:
        return int((await client.database.run(text(statement), seconds=30.0))[0][0])

    async def nothing_is_open() -> None:
        for name in ("workflows not finished", "not propagated"):
            assert await count(BROKEN[name]) == 0, name

    await eventually(nothing_is_open, seconds=180.0)
    return {name: await count(statement) for name, statement in BROKEN.items()}


def finished_in(log: Path) -> list[str]:
    """Return the batches that workers say they have finished; a line may be cut by a kill."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if '"batch.finished"' in line]
    batches = []
    for line in lines:
        try:
            batches.append(str(json.loads(line)["batch"]))
        except ValueError:
            continue
    return batches


def main() -> int:
    """Run it on servers of its own, and print the counts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=180.0)
    options.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    options.add_argument("--workflows", type=int, default=200)
    options.add_argument("--json", type=Path, help="append the result to this file")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedServers(Path(name) / "servers") as servers:
        environment = plain_environment() | servers.environment()
        upgrade_database(environment["JSWORKER_DATABASE_URL"])
        how = {"seconds": given.seconds, "every": given.every, "workflows": given.workflows}
        found = asyncio.run(under_kills(environment, Path(name), **how))
    ok = not any(found[name] for name in [*BROKEN, "finished twice"])
    return close_run("workflows_under_kills", given, found, ok=ok)


if __name__ == "__main__":
    sys.exit(main())
