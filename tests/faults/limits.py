"""``python -m tests.faults.limits``: keys with limits of 1 to 3 under kills: none has more, none idles."""

import argparse
import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import text

from jsworker import JobClient, JobProcessor, Limit
from jsworker.core.settings import Settings
from jsworker.embedded import EmbeddedServers, start_with_parent
from jsworker.ownership.transitions import admission
from jsworker.ownership.upgrading import upgrade_database
from tests.faults.fleet import ROOT, plain_environment
from tests.faults.report import close_run
from tests.faults.schedules import settings_of
from tests.support.polling import eventually

TARGET = "tests.faults.limits:Limited"
LOOK_SECONDS = 0.25
RUNS_LOG = "FAULTS_RUNS_LOG"
OVERLAPS = "overlaps of runs of a key with a limit of 1"

# At the commit of whatever begins a run: who holds the lock sees every run that was committed before it.
WATCH = """
CREATE SCHEMA faults;
CREATE TABLE faults.too_many (key text, running bigint, most integer);
CREATE FUNCTION faults.count_runs() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  found bigint;
  most integer;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(NEW.limit_key, 7));
  SELECT count(*) INTO found FROM jsworker.jobs
  WHERE status || '' = 'processing' AND limit_key IS NOT NULL
    AND kind = NEW.kind AND limit_key = NEW.limit_key;
  SELECT max_running INTO most FROM jsworker.limits WHERE kind = NEW.kind AND key = NEW.limit_key;
  IF found > coalesce(most, 1) THEN
    INSERT INTO faults.too_many VALUES (NEW.limit_key, found, most);
  END IF;
  RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER count_runs AFTER UPDATE ON jsworker.jobs DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.status = 'processing' AND OLD.status <> 'processing')
EXECUTE FUNCTION faults.count_runs();
"""


class Limited(JobProcessor):
    """Waits for a moment, one of each key at a time unless an operator has set another limit."""

    limit = Limit(1, key="key")
    max_stalls = 1000

    async def process(self, job: Any) -> None:
        """Wait, and write down from when until when."""
        note(job, "begin")
        try:
            await asyncio.sleep(job.payload["seconds"])
        finally:
            note(job, "end")


def note(job: Any, what: str) -> None:
    """Append a line to the log of all workers: the key, the run, its worker's process group, and the time."""
    line = f"{job.payload['key']} {job.id}:{job.fencing_token} {os.getpgrp()} {what} {time.monotonic()}\n"
    log = os.open(os.environ[RUNS_LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, line.encode())
    finally:
        os.close(log)


def overlaps(log: str, killed_at: Mapping[int, float], keys: Collection[str]) -> int:
    """Return how many runs of a key began while another of it went on, by what the workers wrote down.

    A run without an end went on until its worker was killed.
    """
    began: dict[str, dict[str, float]] = defaultdict(dict)
    ended: dict[str, float] = {}
    for key, run, group, what, time_ in map(str.split, log.splitlines()):
        if what == "begin":
            began[key][run] = float(time_)
            ended[run] = killed_at.get(int(group), math.inf)
        else:
            ended[run] = float(time_)
    found = 0
    for key in keys:
        until = -math.inf
        for run, at in sorted(began[key].items(), key=itemgetter(1)):
            found += at < until
            until = max(until, ended[run])
    return found


def start(environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a parent with one worker in a session of its own."""
    with log.open("ab") as output:
        return start_with_parent(
            [sys.executable, "-m", "jsworker", "run", TARGET],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            death_signal=signal.SIGKILL,
        )


async def under_kills(
    environment: dict[str, str],
    folder: Path,
    *,
    seconds: float,
    every: float,
    workers: int,
    keys: int,
    jobs: int,
) -> dict[str, Any]:
    """Enqueue jobs of keys, kill a worker every few moments, start another, and judge what ran at once."""
    runs_log = folder / "runs.log"
    environment = environment | {RUNS_LOG: str(runs_log)}
    killed_at: dict[int, float] = {}
    async with JobClient(Settings(**settings_of(environment))) as client:
        for statement in _statements(WATCH):
            await client.database.run(text(statement))
        for number in range(keys):
            await client.limits.set(Limited, Limit(1 + number % 3), key=f"key-{number}")
        payloads = [{"key": f"key-{n % keys}", "seconds": 0.01 * (n % 7)} for n in range(jobs)]
        await client.enqueue_many(Limited, payloads)
        alive = [start(environment, folder / f"{number}.log") for number in range(workers)]
        idle = Idle(client)
        watching = asyncio.create_task(idle.watch())
        try:
            await _kill(alive, environment, folder, killed_at, seconds=seconds, every=every)

            async def all_ended() -> None:
                [row] = await client.database.run(
                    text("SELECT count(*) AS live FROM jsworker.jobs WHERE finished_at IS NULL")
                )
                assert row.live == 0

            await eventually(all_ended, seconds=300.0)
        finally:
            watching.cancel()
            for process in alive:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = await client.database.run(
            text("SELECT status, count(*) AS jobs FROM jsworker.jobs GROUP BY status")
        )
        [too_many] = await client.database.run(text("SELECT count(*) AS moments FROM faults.too_many"))
        [held] = await client.database.run(
            text("SELECT count(*) AS times FROM jsworker.job_events WHERE event = 'held'")
        )
    return {
        **{row.status: row.jobs for row in rows},
        "kills": len(killed_at),
        "times held": held.times,
        "longest idle": round(idle.longest, 2),
        "moments with too many": too_many.moments,
        OVERLAPS: overlaps(
            runs_log.read_text(), killed_at, [f"key-{number}" for number in range(0, keys, 3)]
        ),
    }


class Idle:
    """For how long, at most, a key had a free slot and held jobs at once."""

    def __init__(self, client: JobClient) -> None:
        self._client = client
        self._since: dict[str, float] = {}
        self.longest = 0.0

    async def watch(self) -> None:
        """Look until this is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            now = clock()
            free = [key.key for key in await admission.waiting_keys(self._client.database) if key.jobs > 0]
            self._since = {key: self._since.get(key, now) for key in free}
            self.longest = max([self.longest, *(now - since for since in self._since.values())])
            await asyncio.sleep(LOOK_SECONDS)


async def _kill(
    alive: list[subprocess.Popen[bytes]],
    environment: dict[str, str],
    folder: Path,
    killed_at: dict[int, float],
    *,
    seconds: float,
    every: float,
) -> None:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while clock() < ends_at:
        await asyncio.sleep(every)
        number = random.randrange(len(alive))  # noqa: S311 -- who dies
        os.killpg(alive[number].pid, signal.SIGKILL)
        alive[number].wait()
        killed_at[alive[number].pid] = time.monotonic()
        alive[number] = start(environment, folder / f"{number}.log")


def _statements(script: str) -> list[str]:
    parts = script.strip().split(";\nCREATE ")
    return [part if place == 0 else f"CREATE {part}" for place, part in enumerate(parts)]


def main() -> int:
    """Run it on servers of its own, and print the counts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=120.0)
    options.add_argument("--every", type=float, default=1.0, help="seconds from one kill to the next")
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--keys", type=int, default=40)
    options.add_argument("--jobs", type=int, default=5000)
    options.add_argument("--json", type=Path, help="append the result to this file")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedServers(Path(name) / "servers") as servers:
        environment = plain_environment() | servers.environment()
        upgrade_database(environment["JSWORKER_DATABASE_URL"])
        how = {option: value for option, value in vars(given).items() if option != "json"}
        found = asyncio.run(under_kills(environment, Path(name), **how))
    scans = 2 * Settings.model_fields["scan_interval"].default
    ok = (
        found["moments with too many"] == 0
        and found[OVERLAPS] == 0
        and found.get("completed") == given.jobs
        and found["longest idle"] <= scans + LOOK_SECONDS
    )
    return close_run("limits_under_kills", given, found, ok=ok)


if __name__ == "__main__":
    sys.exit(main())
