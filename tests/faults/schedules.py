"""``python -m tests.faults.schedules``: a schedule of a second under kills; an instant must have one job."""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from jsworker import JobClient, JobDetails, JobProcessor
from jsworker.core.schedule_rules import Every
from jsworker.core.settings import Settings
from jsworker.embedded import EmbeddedServers, start_with_parent
from jsworker.ownership.upgrading import upgrade_database
from tests.faults.fleet import ROOT, plain_environment
from tests.faults.report import close_run
from tests.support.polling import eventually

TARGET = "tests.faults.schedules:EverySecond"
WORKERS = 3


class EverySecond(JobProcessor):
    """Does nothing, every second."""

    schedule = Every(seconds=1)

    async def process(self, job: Any) -> None:
        """Return at once."""


def start(environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a parent with one worker in a session of its own."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", "jsworker", "run", TARGET]
        death = signal.SIGKILL
        return start_with_parent(
            command,
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            death_signal=death,
        )


async def under_kills(
    environment: dict[str, str], folder: Path, *, seconds: float, every: float
) -> dict[str, Any]:
    """Kill one of three workers, parent and child, every few seconds, start another, and judge the jobs."""
    alive = [start(environment, folder / f"{number}.log") for number in range(WORKERS)]
    kills = 0
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    try:
        while clock() < ends_at:
            await asyncio.sleep(every)
            number = random.randrange(WORKERS)  # noqa: S311 -- who dies
            os.killpg(alive[number].pid, signal.SIGKILL)
            alive[number].wait()
            kills += 1
            alive[number] = start(environment, folder / f"{number}.log")
        async with JobClient(Settings(**settings_of(environment))) as client:
            return await judged(client) | {"kills": kills}
    finally:
        for process in alive:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def judged(client: JobClient) -> dict[str, Any]:
    """Wait until all jobs have ended, and count instants without a job and with more than one."""

    async def all_ended() -> list[JobDetails]:
        jobs = await client.list(limit=100_000)
        found = [await client.get(job.id) for job in jobs]
        assert found
        waiting = [job for job in found if job.status != "completed"]
        last = max(each.scheduled_for for each in found if each.scheduled_for is not None)
        assert all(job.scheduled_for == last for job in waiting)
        return found

    jobs = await eventually(all_ended, seconds=120.0)
    times = Counter(job.scheduled_for for job in jobs if job.scheduled_for is not None)
    first, last = min(times), max(times)
    instants = [first + timedelta(seconds=n) for n in range(int((last - first).total_seconds()) + 1)]
    return {
        "instants": len(instants),
        "without a job": sum(instant not in times for instant in instants),
        "with more than one job": sum(number > 1 for number in times.values()),
        "jobs between instants": sum(instant not in set(instants) for instant in times),
    }


def settings_of(environment: dict[str, str]) -> dict[str, str]:
    """Return the settings among variables, by their names."""
    prefix = "JSWORKER_"
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in environment.items()
        if name.startswith(prefix)
    }


def main() -> int:
    """Run it on servers of its own, and print the counts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=180.0)
    options.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    options.add_argument("--json", type=Path, help="append the result to this file")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedServers(Path(name) / "servers") as servers:
        environment = plain_environment() | servers.environment()
        upgrade_database(environment["JSWORKER_DATABASE_URL"])
        found = asyncio.run(under_kills(environment, Path(name), seconds=given.seconds, every=given.every))
    ok = not any(found[name] for name in found if name not in {"instants", "kills"})
    return close_run("schedules_under_kills", given, found, ok=ok)


if __name__ == "__main__":
    sys.exit(main())
