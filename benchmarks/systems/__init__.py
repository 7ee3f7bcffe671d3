"""The systems under measure. Each is a module with the same functions; each runs in processes of its own."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable

from benchmarks.figures import JSWORKER, RAW
from benchmarks.servers import Servers

MODULES = MappingProxyType(
    {
        JSWORKER: "jsworker_run",
        RAW: "raw_loop",
        "pgqueuer": "pgqueuer_run",
        "awa": "awa_run",
        "procrastinate": "procrastinate_run",
        "taskiq-nats": "taskiq_run",
        "FastStream": "faststream_run",
    }
)
"""The modules of the systems, by the names in the figures."""

ALL = tuple(MODULES)

NO_OWNERSHIP = "no ownership"
"""The note on systems that only deliver: nothing decides who owns a job, and no final state is stored."""


class Producer(Protocol):
    """Enqueues jobs, in a process of its own. A job's payload is a number."""

    async def enqueue(self, number: int) -> str:
        """Enqueue one job, durably when this returns, and return its id."""

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Enqueue jobs in one call of the fastest documented way, durably when this returns."""


@runtime_checkable
class SeparatePublisher(Protocol):
    """A producer whose ``enqueue_many`` stores rows only."""

    async def publish_many(self, numbers: Sequence[int]) -> None:
        """Publish the messages of those rows."""


@runtime_checkable
class TransactionalProducer(Protocol):
    """A producer that can enqueue in a transaction of the caller's."""

    def own_transactions(self) -> AbstractAsyncContextManager[Callable[[int], Awaitable[None]]]:
        """Yield a function that commits a row of the caller's together with a job."""


@runtime_checkable
class PublishingProducer(Protocol):
    """A producer with an outbox."""

    async def enqueue_without_nats(self, numbers: Sequence[int]) -> None:
        """Enqueue while NATS cannot be reached."""

    async def all_published(self) -> None:
        """Publish until nothing is left."""


class System(Protocol):
    """A module of this package."""

    @property
    def NOTE(self) -> str:  # noqa: N802 -- a constant of a module
        """What a reader must know about its settings."""

    def prepare(self, servers: Servers) -> dict[str, str]:
        """Create a database or stream for it, and return the environment variables that name these."""

    def workers(self, processes: int) -> list[list[str]]:
        """Return the commands that run so many worker processes."""

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        """Connect a producer to the servers that this process's environment variables name."""

    async def finished(self, variables: Mapping[str, str]) -> int:
        """Return how many jobs are in their final state."""

    async def finish_times(self, variables: Mapping[str, str]) -> dict[str, float] | None:
        """Return when jobs got their final state, by id: seconds since the epoch by the server's clock.

        None: the system stores no such times.
        """


def load(name: str) -> System:
    """Import a system by its name."""
    return cast("System", import_module(f"{__name__}.{MODULES[name]}"))
