"""``python -m jsworker.testing.killed_worker ORDER``: a worker that kills itself, or one that follows it.

It writes its id to stdout, in a line, and then how the job ended, if that was before the moment.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # the modules below make no garbage as they load, and load a quarter faster

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from jsworker.core import fault_points
from jsworker.core.clock import boottime
from jsworker.core.events import Event
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, load_settings
from jsworker.ownership import for_tests
from jsworker.testing.shared_servers import database_at
from jsworker.worker.pipeline.kinds import processor_at
from jsworker.worker.supervision import DeadOwner
from jsworker.worker.worker import Worker

_logger: Final = logging.getLogger("jsworker.testing")
_START_SECONDS: Final = 30.0
ENDED_BEFORE: Final = 3
"""The exit code of a worker whose job ended before the moment at which it was to kill itself."""
_ENDS: Final = ("job.completed", "job.failed", "job.cancelled")
_ENDED: Final = frozenset(name.removeprefix("job.") for name in _ENDS)
_LOOK_SECONDS: Final = 0.5
_ATTEMPT_ENDS: Final = (*_ENDS, "job.error", "job.released", "job.snoozed", "job.lost")


def main() -> None:
    """Run the worker of the order, which is JSON, until its job has ended, or until it kills itself."""
    gc.freeze()
    gc.enable()
    order = json.loads(sys.argv[1])
    sys.path[:] = order["path"]
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    sys.exit(asyncio.run(_work(order)))


async def _work(order: dict[str, Any]) -> int:
    processor = _load(order["origin"], order["file"])
    settings = load_settings()
    worker = Worker([processor], settings, connect_seconds=_START_SECONDS)
    worker.on("*", lambda event: _logger.info("%s %s", event.name, event.fields))
    moment = order.get("at")
    how: list[str] = []
    stopped = asyncio.Event()

    def note(event: Event) -> None:
        if event.fields.get("job_id") == order["job_id"]:
            how.append(
                f"{event.name} {event.fields.get('error') or event.fields.get('reason') or ''}".strip()
            )
            stopped.set()

    for name in _ENDS if moment is None else _ATTEMPT_ENDS:
        worker.on(name, note)
    if moment is not None:
        _arm(worker, order["job_id"], *moment)
    print(worker.id, flush=True)  # noqa: T201 -- read by the process that has started this one
    async with worker:
        if "dead" in order:
            # The starting process has waited for the dead worker's end, as a supervisor does for its child.
            settled_at = boottime() + settings.statement_timeout
            worker.take_back(DeadOwner(order["dead"], "its worker was killed", settled_at))
        # Its run may still come to the moment after a transaction has completed the job.
        ends = _ENDED if moment is None else {"cancelled"}
        how += await _until_ended(UUID(order["job_id"]), settings, stopped, ends)
    print(*how, sep="; ", flush=True)  # noqa: T201
    return 0 if moment is None else ENDED_BEFORE


async def _until_ended(
    job_id: UUID, settings: Settings, stopped: asyncio.Event, ends: Collection[str]
) -> list[str]:
    """Wait for an event that tells a job's end, or for an end without one; return in words how it ended so.

    There is no event of a job that is cancelled before it begins, or that the killed worker has completed.
    """
    async with database_at(settings) as database:
        while not stopped.is_set():
            state = await for_tests.state_of(database, job_id)
            if state["status"] in ends:
                return [f"job.{state['status']} {state['failure_reason'] or ''}".strip()]
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _LOOK_SECONDS)
    return []


def _load(origin: str, file: str | None) -> JobProcessor[Any]:
    """Return the processor of an origin; a module that is not on the Python path is read from its file."""
    name = origin.partition(":")[0]
    try:
        return processor_at(origin)
    except ModuleNotFoundError as error:
        spec = None if file is None else importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return processor_at(origin)


def _arm(worker: Worker, job_id: str, moment: str, value: Any = None) -> None:
    """Make this process kill itself at the moment."""

    async def strike() -> None:
        _die()

    def of_job(call: Callable[[Event], None]) -> Callable[[Event], None]:
        return lambda event: call(event) if event.fields["job_id"] == job_id else None

    def look(event: Event) -> None:
        if (event.fields["progress"] or 0.0) >= value:
            _die()

    match moment:
        case "AtEnd":
            fault_points.install(fault_points.after_process(UUID(job_id)), strike)
        case "AtStep":
            fault_points.install(fault_points.after_step(value), strike)
        case "AtProgress":
            worker.on("job.progress", of_job(look))
        case _:
            worker.on("job.started", of_job(lambda _: _die_after(value)))


def _die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, _die)
    timer.daemon = True
    timer.start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
