"""A producer process: enqueues jobs in every way there is, and records what it was told.

``python -m tests.faults.producer NAME RATE SEED [MOST]`` runs until SIGTERM, or until MOST jobs are enqueued;
jobs whose enqueueing is unclear are tried again under the same unique key before it ends.
"""

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from jsworker import JobClient, enqueue_statement
from jsworker.core.errors import DatabaseUnavailable, JsworkerError
from jsworker.core.priorities import Priority
from jsworker.stream.nats_client import end_tasks
from tests.faults.journal import Journal, records_folder
from tests.faults.process_life import strike_once
from tests.faults.workload import MOST_RUNNING, WORKFLOW

STRIKE_VARIABLE = "FAULTS_STRIKE"
"""A fault point at which this producer kills itself."""

_MIXTURE = (
    ("ordinary", 43),
    ("threaded", 8),
    ("transactional", 12),
    ("fenced", 8),
    ("flaky", 6),
    ("doomed", 1),
    ("limited", 14),
    ("rated", 6),
    (WORKFLOW, 2),
)
_PRIORITIES: tuple[Priority, ...] = ("normal", "high", "normal", "low", "normal")
_PARTS = 4
_LONG_SHARE = 0.1
_TRY_AGAIN_SECONDS = 0.3
_LAST_TRIES_SECONDS = 30.0
_MOST_WAITING = 500
"""So many jobs end within the time that a run has to drain, on any machine that can run it."""
_WAITING = text(
    "SELECT count(*) AS jobs FROM (SELECT FROM jsworker.jobs WHERE status = 'queued' LIMIT :most) AS j"
)
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """A job, or a workflow of that name, that is to exist once."""

    key: str
    kind: str
    payload: dict[str, Any]
    priority: Priority
    limit_key: str | None


class Producer:
    """Enqueues at a rate, less where the workers do not keep up, and keeps at what is unclear."""

    def __init__(self, name: str, rate: float, seed: int, most: int | None) -> None:
        self._name = name
        self._rate = rate
        self._dice = random.Random(f"{seed}-{name}")  # noqa: S311 -- a workload, not a secret
        self._most = most
        self._made = 0
        self._tries = 0
        self._journal = Journal(records_folder(), "producer")
        self._pending: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def run(self) -> None:
        """Produce until told to stop, then see every order through."""
        async with JobClient.from_env() as client:
            self._engine = _engine_of(client)
            looking = asyncio.create_task(self._look(client), name="look what waits")
            while not self.stopping.is_set() and (self._most is None or self._made < self._most):
                orders = self._next_orders()
                task = asyncio.create_task(self._see_through(client, orders))
                self._pending.add(task)
                task.add_done_callback(self._pending.discard)
                await self._pause(len(orders) / self._rate)
                await self._has_room.wait()
            await end_tasks({looking})
            if self._pending:
                await asyncio.wait(self._pending, timeout=_LAST_TRIES_SECONDS)
            await self._engine.dispose()

    async def _look(self, client: JobClient) -> None:
        """Let no more be enqueued while many wait: a slow machine is to be shaken, not buried."""
        while not self.stopping.is_set():
            with suppress(JsworkerError):  # in a fault one goes on as before
                [waiting] = await client.database.run(_WAITING, {"most": _MOST_WAITING})
                if waiting.jobs < _MOST_WAITING:
                    self._has_room.set()
                else:
                    self._has_room.clear()
            await self._sleep(_LOOK_SECONDS)
        self._has_room.set()

    def _next_orders(self) -> list[Order]:
        [kind] = self._dice.choices([kind for kind, _ in _MIXTURE], [weight for _, weight in _MIXTURE])
        number = 1 if kind == WORKFLOW else self._dice.choice([1, 1, 1, 1, 4])
        tenant = self._dice.choice([*MOST_RUNNING]) if kind == "limited" else None
        return [self._order(kind, tenant) for _ in range(number)]

    def _order(self, kind: str, tenant: str | None) -> Order:
        self._made += 1
        key = f"{self._name}-{self._made}"
        priority = _PRIORITIES[self._made % len(_PRIORITIES)]
        return Order(key, kind, {"key": key, "seconds": self._seconds(kind)}, priority, tenant)

    def _seconds(self, kind: str) -> float:
        if kind == "ordinary" and self._dice.random() < _LONG_SHARE:
            return self._dice.uniform(2.1, 3.0)
        return self._dice.uniform(0.05, 0.6)

    async def _pause(self, seconds: float) -> None:
        await self._sleep(self._dice.expovariate(1 / seconds))

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    async def _see_through(self, client: JobClient, orders: list[Order]) -> None:
        how = self._dice.random()
        while orders:
            self._tries += 1
            number = self._tries
            for order in orders:
                self._note("try", order, number, kind=order.kind)
            try:
                told = await self._enqueue(client, orders, how)
            except (DatabaseUnavailable, SQLAlchemyError, OSError) as error:
                self._note_all("unknown", orders, number, error)
            except JsworkerError as error:
                self._note_all("fail", orders, number, error)
            else:
                for order, job_id in zip(orders, told, strict=True):
                    self._note("ok", order, number, job=job_id)
                return
            await asyncio.sleep(_TRY_AGAIN_SECONDS)

    async def _enqueue(self, client: JobClient, orders: list[Order], how: float) -> list[str]:
        if len(orders) > 1:
            payloads, keys = [one.payload for one in orders], [one.key for one in orders]
            first = orders[0]
            many = await client.enqueue_many(
                first.kind,
                payloads,
                unique_keys=keys,
                priority=first.priority,
                limit_key=first.limit_key,
            )
            return [str(one.id) for one in many]
        [order] = orders
        if order.kind == WORKFLOW:
            return [await self._workflow(client, order)]
        if how < 0.2:
            return [await self._in_own_transaction(order)]
        one = await client.enqueue(
            order.kind,
            order.payload,
            unique_key=order.key,
            priority=order.priority,
            limit_key=order.limit_key,
        )
        return [str(one.id)]

    async def _workflow(self, client: JobClient, order: Order) -> str:
        """Enqueue a workflow of four nodes, the last of which runs whatever becomes of the others."""
        part = {"seconds": order.payload["seconds"] / 4}
        async with client.workflow(order.key) as flow:
            flow.batch(self._dice.choice(["ordinary", "limited"]), [part] * _PARTS, name="parts")
            flow.job(self._dice.choice(["growing", "growing", "doomed", "rated"]), part, name="beside")
            flow.batch("ordinary", [part] * 2, name="after", after=["parts", "beside"])
            flow.job("merging", {"parts": _PARTS}, after=["parts", "after"], on_failure="run")
        return str(flow.id)

    async def _in_own_transaction(self, order: Order) -> str:
        """Enqueue without telling NATS: the relay of some worker has to find it."""
        async with asyncio.timeout(3.0), AsyncSession(self._engine) as session, session.begin():
            statement = enqueue_statement(
                order.kind,
                order.payload,
                unique_key=order.key,
                priority=order.priority,
                limit_key=order.limit_key,
            )
            rows = (await session.execute(statement)).all()
            if not rows:  # a twin, our own earlier try, is just being committed
                raise TimeoutError("its twin is being committed")
            return str(rows[0].id)

    def _note_all(self, what: str, orders: list[Order], number: int, error: Exception) -> None:
        for order in orders:
            self._note(what, order, number, error=f"{type(error).__name__}: {error}"[:200])

    def _note(self, what: str, order: Order, number: int, **facts: Any) -> None:
        self._journal.note(what, key=order.key, number=number, **facts)

    def strike_at(self, point: str) -> None:
        """Die at a fault point of the client."""
        strike_once(self._journal, point, signal.SIGKILL)


def _engine_of(client: JobClient) -> AsyncEngine:
    return create_async_engine(client.database.url, pool_size=4, connect_args={"connect_timeout": 3})


async def main() -> None:
    name, rate, seed, *most = sys.argv[1:]
    producer = Producer(name, float(rate), int(seed), int(most[0]) if most else None)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, producer.stopping.set)
    if point := os.environ.get(STRIKE_VARIABLE):
        producer.strike_at(point)
    await producer.run()


if __name__ == "__main__":
    asyncio.run(main())
