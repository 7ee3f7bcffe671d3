"""(g) What a job costs: statements, WAL, messages and CPU seconds, in a flood and at a steady pace."""

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.cpu_time import cpu_seconds, own_cpu_seconds
from benchmarks.measures.jsworker_processes import Workers, workers
from benchmarks.measures.load import enqueue_at_pace, new_client, preload, wait_until_finished
from benchmarks.measures.sample_processors import NOOP, STAMP
from benchmarks.measures.statements import logged_statements, read_server
from benchmarks.servers import Servers
from jsworker.embedded import EmbeddedNats, EmbeddedPostgres
from jsworker.embedded.resources import LOOPBACK, free_port
from jsworker.ownership.transitions.enqueue import new_job_id

LETTER: Final = "g"
TITLE: Final = "cost of a job"

_PER_SECOND = 200.0
_STATISTICS_SECONDS = 1.5
"""After this time an idle backend of PostgreSQL has reported its counters."""


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    jobs: int = 20_000,
    paced_seconds: float = 30.0,
    logged_jobs: int = 2_000,
) -> list[Figure]:
    """Measure what each job costs, in a backlog and when jobs come one by one at 200/s.

    Args:
        rounds: the number of rounds of each.
        show: called with what is going on.
        jobs: of the backlog; enqueueing them is not counted.
        paced_seconds: how long jobs come at a steady pace; the producer's use is counted, except its CPU.
        logged_jobs: jobs of another backlog, whose statements the notes list by name.
    """
    with _monitored_servers() as (servers, monitor):
        floods, paces = [], []
        for n in range(rounds):
            show(f"cost of a backlog, round {n + 1}")
            floods.append(_flood(servers, monitor, jobs))
            show(f"cost at {_PER_SECOND:g} jobs/s, round {n + 1}")
            paces.append(_pace(servers, monitor, paced_seconds))
        show("statements by name")
        flood_note = _statements_of_a_flood(servers, logged_jobs)
        pace_note = _statements_at_pace(servers, min(paced_seconds, 10.0))
    return [
        *_figures(f"backlog of {jobs:,}", floods, f"without enqueue; {flood_note}"),
        *_figures(f"{_PER_SECOND:g} jobs/s, with enqueue", paces, pace_note),
    ]


@dataclass(frozen=True, slots=True)
class _Used:
    """What the servers and jsworker's processes have used since their start.

    Attributes:
        statements: transactions; each statement is one.
        received, sent: messages that NATS has received from its clients and sent to them.
        postgres, nats, worker, supervisor: CPU seconds.
    """

    statements: float
    wal_bytes: float
    received: float
    sent: float
    postgres: float
    nats: float
    worker: float
    supervisor: float

    def since(self, before: "_Used", jobs: int) -> dict[str, float]:
        """Return what each of ``jobs`` has cost since an earlier reading."""
        return {name: (getattr(self, name) - getattr(before, name)) / jobs for name in self.__slots__}


@contextmanager
def _monitored_servers() -> Iterator[tuple[Servers, str]]:
    """Run both servers with their defaults and NATS's monitoring; yield them and the monitoring address."""
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # PostgreSQL started by root runs as another user
        with (
            EmbeddedPostgres(Path(folder) / "postgres") as postgres,
            EmbeddedNats(Path(folder) / "nats", config=f'http: "{LOOPBACK}:{port}"') as nats,
        ):
            yield Servers(postgres, nats, Path(folder)), f"http://{LOOPBACK}:{port}/varz"
            postgres.stop()
            nats.stop()


def _flood(servers: Servers, monitor: str, jobs: int) -> dict[str, float]:
    variables = servers.new_jsworker()
    first = asyncio.run(preload(variables, jobs))
    # Read before the processes start, because they pull as soon as they are ready.
    before = _used(servers, monitor, variables, None)
    with workers(1, [NOOP], variables) as running:
        asyncio.run(wait_until_finished(variables["JSWORKER_DATABASE_URL"], first))
        time.sleep(_STATISTICS_SECONDS)
        return _used(servers, monitor, variables, running).since(before, jobs)


def _pace(servers: Servers, monitor: str, seconds: float) -> dict[str, float]:
    variables = servers.new_jsworker()
    with workers(1, [STAMP], variables) as running:
        return asyncio.run(_paced(servers, monitor, variables, running, seconds))


async def _paced(
    servers: Servers, monitor: str, variables: Mapping[str, str], running: Workers, seconds: float
) -> dict[str, float]:
    async with new_client(variables) as client:
        await enqueue_at_pace(client, per_second=_PER_SECOND, seconds=0.5)  # connections open
        await asyncio.sleep(_STATISTICS_SECONDS)
        before, first = _used(servers, monitor, variables, running), new_job_id()
        await enqueue_at_pace(client, per_second=_PER_SECOND, seconds=seconds)
    await wait_until_finished(variables["JSWORKER_DATABASE_URL"], first)
    await asyncio.sleep(_STATISTICS_SECONDS)
    after = _used(servers, monitor, variables, running)
    return after.since(before, round(_PER_SECOND * seconds))


def _used(servers: Servers, monitor: str, variables: Mapping[str, str], running: Workers | None) -> _Used:
    server = read_server(servers.postgres, variables["JSWORKER_DATABASE_URL"])
    with urllib.request.urlopen(monitor) as answer:  # noqa: S310  # nosec B310  # our own server's http address
        messages = json.load(answer)
    return _Used(
        statements=server.commits,
        wal_bytes=server.wal_bytes,
        received=messages["in_msgs"],
        sent=messages["out_msgs"],
        postgres=cpu_seconds(servers.postgres.pid),
        nats=cpu_seconds(servers.nats.pid),
        worker=cpu_seconds(*running.children) if running else 0.0,
        supervisor=own_cpu_seconds(running.parent) if running else 0.0,
    )


def _statements_of_a_flood(servers: Servers, jobs: int) -> str:
    variables = servers.new_jsworker()
    first = asyncio.run(preload(variables, jobs))
    with logged_statements(servers.postgres) as log, workers(1, [NOOP], variables):
        asyncio.run(wait_until_finished(variables["JSWORKER_DATABASE_URL"], first))
    return f"statements of {jobs:,} jobs: {log.told()}"


def _statements_at_pace(servers: Servers, seconds: float) -> str:
    async def pace() -> None:
        async with new_client(variables) as client:
            await enqueue_at_pace(client, per_second=_PER_SECOND, seconds=seconds)

    variables = servers.new_jsworker()
    with workers(1, [STAMP], variables), logged_statements(servers.postgres) as log:
        asyncio.run(pace())
    return f"statements of {round(_PER_SECOND * seconds):,} jobs: {log.told()}"


_SHOWN = {
    "statements": ("statements", "per job", 1.0),
    "wal_bytes": ("WAL", "bytes per job", 1.0),
    "received": ("messages to NATS", "per job", 1.0),
    "sent": ("messages from NATS", "per job", 1.0),
    "postgres": ("CPU of PostgreSQL", "s per 1,000 jobs", 1000.0),
    "nats": ("CPU of nats-server", "s per 1,000 jobs", 1000.0),
    "worker": ("CPU of the worker", "s per 1,000 jobs", 1000.0),
    "supervisor": ("CPU of the supervisor", "s per 1,000 jobs", 1000.0),
}


def _figures(load: str, rounds: list[dict[str, float]], statements: str) -> list[Figure]:
    notes = {"statements": statements, "worker": "its start included" if "backlog" in load else ""}
    return [
        Figure(
            LETTER,
            f"{load}: {what}",
            JSWORKER,
            unit,
            tuple(factor * used[name] for used in rounds),
            more_is_better=False,
            note=notes.get(name, ""),
        )
        for name, (what, unit, factor) in _SHOWN.items()
    ]
