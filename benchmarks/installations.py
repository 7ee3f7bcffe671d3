"""Three installations side by side behind one client: each has servers and a worker of its own.

Run by hand: ``python -m benchmarks.installations [--jobs N] [--rate N] [--outage S]``. First as many jobs as
fast as possible, through one installation and through three; then jobs at a rate, with the PostgreSQL of one
installation killed for some seconds. ``docs/operate/capacity.md`` shows what it prints.
"""

import argparse
import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.measures.jsworker_processes import workers
from benchmarks.processes import wait_until
from benchmarks.servers import Servers, running_servers
from jsworker import DatabaseUnavailable, Job, JobClient, JobHandle, JobProcessor, load_settings

NAMES = ("a", "b", "c")
_DEADLINE_SECONDS = 600.0
_JOBS = "SELECT status, count(*) FROM jsworker.jobs GROUP BY status"
_BYTES = """
SELECT CAST(sum(pg_total_relation_size(oid)) AS bigint) FROM pg_class
WHERE relnamespace = 'jsworker'::regnamespace AND relkind = 'r'
"""


class Nothing(JobProcessor[dict[str, int]]):
    """Does nothing."""

    async def process(self, job: Job[dict[str, int]]) -> None:
        """Return."""


class Installations:
    """Several installations behind one door. Of each key the jobs go to the same installation."""

    def __init__(self, clients: Mapping[str, JobClient]) -> None:
        self._clients = clients

    def of(self, key: str) -> str:
        """Return the installation of a key: the one with the highest hash of both names.

        A new installation takes its share of the keys from all others, and no key moves between those.
        """
        return max(self._clients, key=lambda name: hashlib.sha256(f"{name} {key}".encode()).digest())

    async def enqueue(self, kind: str, payload: Any, *, unique_key: str) -> JobHandle:
        """Enqueue in the key's installation: elsewhere a second job of the key could be live."""
        return await self._clients[self.of(unique_key)].enqueue(kind, payload, unique_key=unique_key)

    async def enqueue_anywhere(self, kind: str, payload: Any, *, spread_by: str) -> tuple[str, JobHandle]:
        """Enqueue a job without a key in the first installation that takes it, beginning with its own.

        A call that got no answer may have been stored: the job may then run in two installations.
        """
        own = self.of(spread_by)
        for name in [own, *(other for other in self._clients if other != own)]:
            try:
                return name, await self._clients[name].enqueue(kind, payload)
            except DatabaseUnavailable:
                continue
        raise DatabaseUnavailable("no installation takes jobs")


@dataclass(frozen=True)
class Running:
    """The running servers, and the variables with the addresses of database and stream, by installation."""

    servers: Mapping[str, Servers]
    variables: Mapping[str, dict[str, str]]

    def client(self, name: str) -> JobClient:
        """Return a client of an installation, not open yet."""
        values = {key.removeprefix("JSWORKER_").lower(): value for key, value in self.variables[name].items()}
        return JobClient(load_settings(**values))

    def jobs(self, name: str) -> Counter[str]:
        """Return the number of an installation's jobs by status."""
        with psycopg.connect(self.variables[name]["JSWORKER_DATABASE_URL"]) as connection:
            return Counter(dict(connection.execute(_JOBS).fetchall()))

    def bytes_a_job(self, name: str) -> float:
        """Return the size of an installation's tables and indexes for each of its jobs."""
        with psycopg.connect(self.variables[name]["JSWORKER_DATABASE_URL"]) as connection:
            [(size,)] = connection.execute(_BYTES).fetchall()
        return float(size / self.jobs(name).total())

    async def done(self, names: Sequence[str]) -> None:
        """Wait until all jobs of some installations have ended."""

        async def asked() -> bool:
            return all(set(self.jobs(name)) <= {"completed", "failed", "cancelled"} for name in names)

        await wait_until(asked, [], what="all jobs have ended", seconds=_DEADLINE_SECONDS)


@contextmanager
def three_installations() -> Iterator[Running]:
    """Run servers and one worker process for each installation."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running_servers()) for name in NAMES}
        variables = {name: each.new_jsworker() for name, each in servers.items()}
        for each in variables.values():
            stack.enter_context(workers(1, ["benchmarks.installations:Nothing"], each))
        yield Running(servers, variables)


async def burst(running: Running, names: Sequence[str], jobs: int) -> tuple[float, Counter[str]]:
    """Enqueue jobs through some of the installations; return jobs a second to the end, and the shares."""
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(running.client(name)) for name in names}
        doors = Installations(clients)
        shares = Counter(doors.of(str(number)) for number in range(jobs))
        began = clock()
        await asyncio.gather(
            *(clients[name].enqueue_many("nothing", [{}] * share) for name, share in shares.items())
        )
        await running.done(names)
        return jobs / (clock() - began), shares


async def outage(running: Running, *, rate: float, seconds: float) -> dict[str, Any]:
    """Enqueue at a rate, half of the jobs with a key; for ``seconds`` one installation has no database."""
    clock = asyncio.get_running_loop().time
    accepted: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(running.client(name)) for name in NAMES}
        doors = Installations(clients)

        async def place(number: int) -> None:
            key = f"key {number}"
            if number % 2:
                name, _ = await doors.enqueue_anywhere("nothing", {"n": number}, spread_by=key)
                accepted[name] += 1
                elsewhere[doors.of(key)] += int(name != doors.of(key))
                return
            try:
                await doors.enqueue("nothing", {"n": number}, unique_key=key)
            except DatabaseUnavailable:
                refused[doors.of(key)] += 1
            else:
                accepted[doors.of(key)] += 1

        postgres = running.servers["b"].postgres
        began, number, phase = clock(), 0, 0
        async with asyncio.TaskGroup() as placing:
            while (now := clock() - began) < 3 * seconds:
                if phase == 0 and now > seconds:
                    phase = 1
                    placing.create_task(asyncio.to_thread(postgres.kill))
                if phase == 1 and now > 2 * seconds:
                    phase = 2
                    placing.create_task(asyncio.to_thread(postgres.start))
                placing.create_task(place(number))
                number += 1
                await asyncio.sleep(max(0.0, began + number / rate - clock()))
        await running.done(NAMES)
    return {"enqueued": number, "accepted": accepted, "elsewhere": elsewhere, "refused": refused}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both parts and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--outage", type=float, default=10.0)
    given = parser.parse_args(arguments)
    say = print
    with three_installations() as running:
        for names in (NAMES[:1], NAMES):
            rate, shares = asyncio.run(burst(running, names, given.jobs))
            parts = ", ".join(f"{name} {share:,}" for name, share in sorted(shares.items()))
            say(f"{given.jobs:,} jobs through {len(names)}: {rate:,.0f} jobs/s, enqueued to done ({parts})")
        say(f"tables, indexes, timelines of a: {running.bytes_a_job('a'):,.0f} bytes for each completed job")
        before = {name: running.jobs(name)["completed"] for name in NAMES}
        found = asyncio.run(outage(running, rate=given.rate, seconds=given.outage))
        say(f"\n{found['enqueued']:,} jobs at {given.rate:g}/s; b has no PostgreSQL for {given.outage:g} s")
        say("installation   accepted   its own, taken elsewhere   refused   completed")
        for name in NAMES:
            done = running.jobs(name)["completed"] - before[name]
            say(
                f"{name:<12}{found['accepted'][name]:>11,}{found['elsewhere'][name]:>27,}"
                f"{found['refused'][name]:>10,}{done:>12,}"
            )


if __name__ == "__main__":
    main()
