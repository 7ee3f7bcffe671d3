"""The writes of a run: each is guarded by its fencing token and repeated until the database answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import tenacity

from jsworker.core.clock import boottime
from jsworker.core.contents import Contents
from jsworker.core.errors import OwnershipLost, may_answer_later
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import heartbeat
from jsworker.worker.pipeline.in_flight import Run

T = TypeVar("T")

PAUSES = tenacity.wait_random_exponential(multiplier=0.1, max=2.0)
_FETCHED_AT_ONCE = 3  # each uses bandwidth and a connection that other statements need, too


@dataclass(frozen=True, slots=True)
class LeaseServices:
    """The objects that all leases of a worker share."""

    worker_id: str
    settings: Settings
    contents: Contents
    database: Database
    sessions: Sessions
    events: Events
    loop: asyncio.AbstractEventLoop
    on_quiet: Callable[[], None] = lambda: None  # called when a quiet phase is announced or ended
    cover_others: Callable[[], Awaitable[None]] | None = None  # extends a quiet phase to other runs here
    on_sign: Callable[[], None] = lambda: None  # called when the job has given a sign of life
    on_added: Callable[[], None] = lambda: None  # called when jobs were enqueued that wait to be published
    fetching: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_FETCHED_AT_ONCE))
    kinds: frozenset[str] = frozenset()  # the kinds whose jobs need the slots of this process
    loop_ends: Callable[[], bool] = lambda: False  # whether all tasks of the event loop have been cancelled


async def write_owned(
    run: Run, services: LeaseServices, statement: Callable[..., Awaitable[T]], **values: Any
) -> T:
    """Write to the row of the run, which also counts as a sign of life."""
    # A write in order that is under way goes first, so that others cannot overtake it for ever.
    with suppress(TimeoutError):
        async with asyncio.timeout(services.database.seconds_for(0)), run.order_lock:
            pass
    return await _write(run, services, statement, values)


async def write_in_order(
    run: Run, services: LeaseServices, statement: Callable[..., Awaitable[datetime]], **values: Any
) -> None:
    """Write as ``write_owned``; a try that gets no answer writes nothing once a later write was answered."""
    async with run.order_lock:
        values["seen"] = run.progress_seen
        run.progress_seen = await _write(run, services, statement, values)


async def _write(
    run: Run, services: LeaseServices, statement: Callable[..., Awaitable[T]], values: dict[str, Any]
) -> T:
    started = boottime()
    with _noting_loss(run):
        written = await statement(services.database, worker_id=services.worker_id, held=run.held, **values)
    run.beaten_at = max(run.beaten_at, started)
    note_sign(run, services)
    return written


def note_sign(run: Run, services: LeaseServices) -> None:
    """Note a sign of life of the job itself."""
    run.sign_at = boottime()
    services.on_sign()


async def note_beginning(run: Run, services: LeaseServices) -> None:
    """Store that the job begins, as progress that changes no value: a RESET counts no stall before it."""
    nothing = dict.fromkeys(("stage", "progress", "message"))
    run.progress_seen = await write_owned(run, services, heartbeat.update_progress, **nothing)


async def until_answered(run: Run, ask: Callable[[int], Awaitable[T]]) -> T:
    """Call ``ask``, with the number of tries so far, until the database answers or the run is stopped.

    If the answer is that the job is lost, the run is noted as lost before the error is raised.
    """
    async for attempt in tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(may_answer_later),
        wait=PAUSES,
        stop=lambda _: run.stop is not None,
        reraise=True,
    ):
        with attempt, _noting_loss(run):
            return await ask(attempt.retry_state.attempt_number - 1)
    raise AssertionError


@contextmanager
def _noting_loss(run: Run) -> Iterator[None]:
    try:
        yield
    except OwnershipLost:
        run.lose()
        raise
