"""(c) Enqueueing: one job at a time, many in a call, and inside the caller's own transaction."""

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.figures import JSWORKER, RAW, Figure
from benchmarks.processes import answer_of, module
from benchmarks.runs import Rounds, tidy_databases
from benchmarks.servers import Servers, running_servers
from benchmarks.systems import ALL, NO_OWNERSHIP, load

LETTER: Final = "c"
TITLE: Final = "Enqueueing, durable when the call returns"
SINGLE: Final = "one at a time, awaited"
OWN_TRANSACTION: Final = "in the caller's transaction, one at a time"
RELAY: Final = "publishing what enqueue_many left"
ACCEPTED_AND_PUBLISHED: Final = "enqueue_many in one call, until all is published"

_SECONDS = 180.0
_SLOW = {"procrastinate": 0.2, "taskiq-nats": 0.2, "FastStream": 0.2}
"""The shares of the many jobs that slow systems get, so that a round ends soon."""

_WAYS = {
    JSWORKER: "INSERT commit, then publish",
    RAW: "INSERT commit, then publish",
    "pgqueuer": "a pool, as advised for producers",
    "awa": "insert",
    "procrastinate": "defer",
}
_BULK_WAYS = {
    JSWORKER: "enqueue_many",
    RAW: "COPY, not published",
    "pgqueuer": "enqueue with lists",
    "awa": "enqueue_many_copy",
    "procrastinate": "batch_defer",
}
_PUBLISHED = f"{NO_OWNERSHIP}; published, 500 in flight"


def in_one_call(jobs: int) -> str:
    """Return the figure's name."""
    return f"{jobs:,} in one call"


def in_calls(size: int) -> str:
    """Return the figure's name."""
    return f"in calls of {size:,}"


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    single: int = 1_000,
    many: int = 50_000,
    call: int = 1_000,
    systems: Sequence[str] = ALL,
) -> list[Figure]:
    """Measure each way on an empty database or stream of its own, without a worker."""
    measured = Rounds(LETTER, systems, rounds, show)
    with running_servers() as servers:
        for system in measured.systems("enqueueing"):
            with measured.failing(system):
                count = int(many * _SLOW.get(system, 1.0))
                value = _produced(servers, system, "single", single)
                measured.add(SINGLE, system, "jobs/s", value, note=_WAYS.get(system, NO_OWNERSHIP))
                note = _BULK_WAYS.get(system, _PUBLISHED) + (f"; {count:,} jobs" if count != many else "")
                value = _produced(servers, system, "many", count, count)
                measured.add(in_one_call(many), system, "jobs/s", value, note=note)
                value = _produced(servers, system, "many", count, call)
                measured.add(in_calls(call), system, "jobs/s", value, note=note)
                if system in {JSWORKER, RAW}:
                    value = _produced(servers, system, "transaction", single)
                    measured.add(
                        OWN_TRANSACTION, system, "commits/s", value, note="a row of the caller's each"
                    )
                if system == JSWORKER:
                    _add_publishing(servers, measured, many)
    return measured.figures()


def _produced(servers: Servers, name: str, way: str, *arguments: int) -> float:
    variables = load(name).prepare(servers)
    tidy_databases(variables)
    command = module("benchmarks.producing", name, way, *map(str, arguments))
    return float(answer_of(command, variables, seconds=_SECONDS))


def _add_publishing(servers: Servers, measured: Rounds, many: int) -> None:
    value = _produced(servers, JSWORKER, "published", many)
    measured.add(ACCEPTED_AND_PUBLISHED, JSWORKER, "jobs/s", value, note="the client publishes meanwhile")
    value = _produced(servers, JSWORKER, "relayed", many)
    measured.add(RELAY, JSWORKER, "messages/s", value, note="publish_pending; NATS was away before")
