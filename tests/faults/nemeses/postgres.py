"""What can happen to PostgreSQL: stopped, frozen, its connections ended or refused, its rows locked."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import psycopg

from jsworker.core.clock import boottime
from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.fleet import send
from tests.faults.history import SLOTS_EXHAUSTED
from tests.faults.records import ROLE

_LOCKED_ROWS = 6
_TERMINATIONS = 6
_TRANSACTIONS = 150
_HOLD_SECONDS = 0.6
_ROUNDS = 20
_EXHAUSTED_THRESHOLDS = 2.5
_CONNECTING_SECONDS = 40.0
"""Within which every connection of the server is taken."""


async def stopped_immediately(field: Battlefield) -> None:
    """An immediate stop, and a start with recovery."""
    async with field.fault("postgres_immediate_stop", "database"):
        await field.stores.stop_postgres_immediately()
        await asyncio.to_thread(field.stores.postgres.start)


async def killed(field: Battlefield) -> None:
    """SIGKILL of every process of the server."""
    async with field.fault("postgres_sigkill", "database"):
        await asyncio.to_thread(field.stores.postgres.kill)
        await asyncio.to_thread(field.stores.postgres.start)


async def outage(field: Battlefield) -> None:
    """Away for two stale thresholds: every live owner looks stale to whoever is back first."""
    async with field.fault("postgres_outage", "database"):
        await field.stores.stop_postgres_immediately()
        await asyncio.sleep(2 * field.stale_seconds)
        await asyncio.to_thread(field.stores.postgres.start)


async def frozen(field: Battlefield) -> None:
    """SIGSTOP of every process of the server: connections stay, nothing answers."""
    async with field.fault("postgres_frozen", "database"):
        stopped = [field.stores.postgres.pid, *field.stores.backends()]
        _signal_all(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.2 * field.stale_seconds)
        finally:
            _signal_all(stopped, signal.SIGCONT)


async def backends_terminated(field: Battlefield) -> None:
    """A random half of the connections is ended, again and again."""
    terminate = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND usename = %s AND random() < 0.5"
    )
    async with field.fault("backends_terminated", "database") as fault:
        ended = 0
        for _ in range(_TERMINATIONS):
            ended += int(str((await field.stores.execute(terminate, ROLE))[0][0]))
            await asyncio.sleep(0.4)
        fault.fired = ended > 0


async def killed_in_transactions(field: Battlefield) -> None:
    """Twice a second every backend that is in a job's own transaction is ended: no error of those jobs."""
    terminate = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE usename = %s AND state = 'idle in transaction'"
    )
    await field.enqueue("transactional", count=_TRANSACTIONS, seconds=0.1, hold=_HOLD_SECONDS)
    async with field.fault("backends_terminated_in_transactions", "database") as fault:
        ended = 0
        for _ in range(_ROUNDS):
            ended += int(str((await field.stores.execute(terminate, ROLE))[0][0]))
            await asyncio.sleep(0.5)
        fault.fired = ended > 0


async def slots_exhausted(field: Battlefield) -> None:
    """Somebody else has every connection that the server allows: workers and a new child wait for one."""
    pod, victim = await field.victim()
    others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE usename = %s AND application_name <> 'hog'"
    )
    async with field.fault(SLOTS_EXHAUSTED, "database") as fault, AsyncExitStack() as stack:
        fault.fired = False
        until = boottime() + _CONNECTING_SECONDS
        while boottime() < until:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    field.stores.database_url, autocommit=True, connect_timeout=5, application_name="hog"
                )
            except psycopg.OperationalError:
                if not fault.fired:
                    fault.fired = True
                    until = boottime() + _EXHAUSTED_THRESHOLDS * field.stale_seconds
                    await field.stores.execute(others, ROLE)
                    async with field.fault("sigkill_child", "process", pods=[pod], pids=[victim]):
                        send(victim, signal.SIGKILL)
                await asyncio.sleep(0.01)
            else:
                stack.push_async_callback(connection.close)


async def connections_refused(field: Battlefield) -> None:
    """The role may have only few connections, for a stale threshold and a half."""
    async with field.fault("connection_limit", "database"):
        await field.stores.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT 3")
        await field.stores.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", ROLE
        )
        await asyncio.sleep(1.5 * field.stale_seconds)
        await field.stores.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")


async def running_rows_locked(field: Battlefield) -> None:
    """Somebody holds locks on running jobs for two stale thresholds."""
    rows = "SELECT id::text FROM jsworker.jobs WHERE status = 'processing' LIMIT %s FOR UPDATE SKIP LOCKED"
    await _hold(field, "running_rows_locked", rows, 2 * field.stale_seconds)


async def queued_rows_locked(field: Battlefield) -> None:
    """A session stays idle in its transaction with locks on jobs that are waiting to be claimed."""
    rows = "SELECT id::text FROM jsworker.jobs WHERE status = 'queued' LIMIT %s FOR UPDATE SKIP LOCKED"
    # Producers and claims are fast: something must be kept waiting, so that there is something to lock.
    await _hold(field, "idle_in_transaction", rows, 1.5 * field.stale_seconds)


async def _hold(field: Battlefield, name: str, query: str, seconds: float) -> None:
    async with field.fault(name, "rows") as fault:
        connection = await psycopg.AsyncConnection.connect(field.stores.admin_url)
        async with connection:
            for _ in range(200):
                cursor = await connection.execute(query.encode(), [_LOCKED_ROWS])
                locked = [str(row[0]) for row in await cursor.fetchall()]
                fault.jobs.update(locked)
                if locked:
                    break
                await connection.rollback()
                await asyncio.sleep(0.02)
            fault.fired = bool(fault.jobs)
            await asyncio.sleep(seconds)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # a backend that has ended meanwhile


NEMESES: dict[str, Nemesis] = {
    "postgres_immediate_stop": stopped_immediately,
    "postgres_sigkill": killed,
    "postgres_outage": outage,
    "postgres_frozen": frozen,
    "backends_terminated": backends_terminated,
    "backends_terminated_in_transactions": killed_in_transactions,
    SLOTS_EXHAUSTED: slots_exhausted,
    "connection_limit": connections_refused,
    "running_rows_locked": running_rows_locked,
    "idle_in_transaction": queued_rows_locked,
}
