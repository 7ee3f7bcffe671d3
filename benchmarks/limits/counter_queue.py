"""A queue that counts free slots in a row of its own, as Solid Queue does.

A worker lowers the count to take a slot, and raises it when a run ends; a row that nobody has changed for a
while is deleted. A worker that dies does not raise it; its jobs are put back when its heartbeat is old.
"""

import asyncio
import os
import random
import signal
import uuid

import psycopg

from benchmarks.limits import journal

VARIABLE = "COUNTER_QUEUE_URL"
_KEY = "key"
_POLL_SECONDS = 0.02

SCHEMA = """
CREATE TABLE jobs (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'ready', worker text);
CREATE INDEX jobs_ready ON jobs (id) WHERE state = 'ready';
CREATE INDEX jobs_claimed ON jobs (worker) WHERE state = 'claimed';
CREATE TABLE semaphores (key text PRIMARY KEY, value integer NOT NULL, expires_at timestamptz NOT NULL);
CREATE TABLE workers (id text PRIMARY KEY, seen_at timestamptz NOT NULL);
"""
_SLOT = """
INSERT INTO semaphores AS s
VALUES (%(key)s, %(limit)s - 1, clock_timestamp() + %(lives)s * interval '1 second')
ON CONFLICT (key) DO UPDATE SET value = s.value - 1, expires_at = excluded.expires_at WHERE s.value > 0
RETURNING value
"""
_CLAIM = """
UPDATE jobs SET state = 'claimed', worker = %(worker)s
WHERE id = (SELECT id FROM jobs WHERE state = 'ready' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id
"""
_FREE = """
UPDATE semaphores SET value = value + 1, expires_at = clock_timestamp() + %(lives)s * interval '1 second'
WHERE key = %(key)s AND value < %(limit)s
"""
_END = "UPDATE jobs SET state = 'completed' WHERE id = %(id)s AND worker = %(worker)s"
_BEAT = """
INSERT INTO workers VALUES (%(worker)s, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
"""
_PUT_BACK = """
UPDATE jobs SET state = 'ready', worker = NULL WHERE state = 'claimed' AND worker IN (
  SELECT id FROM workers WHERE seen_at < clock_timestamp() - %(silence)s * interval '1 second')
"""
_EXPIRE = "DELETE FROM semaphores WHERE expires_at < clock_timestamp()"


def prepare(url: str, jobs: int) -> None:
    """Create the tables, and jobs."""
    with psycopg.connect(url) as connection:
        connection.execute(SCHEMA.encode())
        connection.execute("INSERT INTO jobs SELECT * FROM generate_series(1, %s)", [jobs])


async def work(*, limit: int, silence: float, slots: int, run_seconds: tuple[float, float]) -> None:
    """Work until SIGTERM."""
    values = {
        "key": _KEY,
        "limit": limit,
        "lives": 3 * silence,
        "silence": silence,
        "worker": str(uuid.uuid4()),
    }
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)

    async def run_jobs() -> None:
        async with await _connected() as connection:
            while not stopped.is_set():
                job = await _claimed(connection, values)
                if job is None:
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                with journal.running(str(job)):
                    await asyncio.sleep(random.uniform(*run_seconds))  # noqa: S311 -- no two runs in step
                async with connection.transaction():
                    await connection.execute(_END, values | {"id": job})
                    await connection.execute(_FREE, values)

    async def beat() -> None:
        async with await _connected() as connection:
            while not stopped.is_set():
                for statement in (_BEAT, _PUT_BACK, _EXPIRE):
                    await connection.execute(statement, values)
                await asyncio.sleep(silence / 4)

    await asyncio.gather(beat(), *(run_jobs() for _ in range(slots)))


async def _connected() -> psycopg.AsyncConnection[tuple[int]]:
    return await psycopg.AsyncConnection[tuple[int]].connect(os.environ[VARIABLE], autocommit=True)


async def _claimed(connection: psycopg.AsyncConnection[tuple[int]], values: dict[str, object]) -> int | None:
    """Take a slot and a job, or neither."""
    async with connection.transaction() as both:
        if await (await connection.execute(_SLOT, values)).fetchone() is None:
            return None
        row = await (await connection.execute(_CLAIM, values)).fetchone()
        if row is None:
            raise psycopg.Rollback(both)
        return row[0]
    return None
