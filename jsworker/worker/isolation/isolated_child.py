"""``python -m jsworker.worker.isolation.isolated_child PARENT LIFELINE FD``: runs one job alone and ends."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

from jsworker.core import tracing
from jsworker.core.clock import boottime
from jsworker.core.contents import Contents
from jsworker.core.events import Events
from jsworker.core.message_link import MessageLink
from jsworker.core.targets import import_modules
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.telemetry.logs import configure_logs, drain_logs, speaking_worker
from jsworker.worker.isolation import isolated_messages as wire
from jsworker.worker.isolation.parent_death_signal import follow_parent, leave_to_parent
from jsworker.worker.lifecycle import Loop
from jsworker.worker.pipeline.attempt import judged, open_job, process_job
from jsworker.worker.pipeline.in_flight import Phase, Run, StopReason
from jsworker.worker.pipeline.kinds import Kind, named_at, processor_at, resolve_kinds
from jsworker.worker.pipeline.outcomes import Outcome, stopped
from jsworker.worker.pipeline.run_writes import LeaseServices
from jsworker.worker.stacks import of_run, within_bounds

_FLUSH_SECONDS: Final = 2.0
_TICKS_A_TIMEOUT: Final = 4


def main() -> None:
    """Take the order, run the job, report the outcome. The process ends with its owner, however that ends."""
    follow_parent(int(sys.argv[1]), signal.SIGKILL, int(sys.argv[2]))
    # For the owner, which decides what becomes of the job.
    leave_to_parent((signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
    end = socket.socket(fileno=int(sys.argv[3]))
    os.set_inheritable(end.fileno(), False)
    asyncio.run(_work(end))


async def _work(end: socket.socket) -> NoReturn:
    messages: asyncio.Queue[wire.FromOwner] = asyncio.Queue()
    link = MessageLink(
        end,
        wire.FROM_OWNER,
        on_message=messages.put_nowait,
        on_end=_end,
        on_invalid=_end,  # an owner of another version
        longest_line=sys.maxsize,
    )
    link.open()
    order = await messages.get()
    if not isinstance(order, wire.Order):
        _end()
    settings = order.settings
    configure_logs(format=settings.log_format, level=settings.log_level)
    speaking_worker.set(order.worker_id)
    sys.path[:] = order.path
    import_modules(settings.preload)
    processor = processor_at(order.origin)
    contents = Contents.of(settings)
    middleware = [named_at(origin) for origin in order.middleware]
    kinds = resolve_kinds([processor], settings, middleware, conceals=contents.codec is not None)
    kind = kinds[order.claimed.kind]
    now = boottime()
    run = Run(order.claimed, kind, None, beaten_at=now, now=now)

    def send_state() -> None:
        link.send(
            wire.RunState(sign_at=run.sign_at, quiet_seconds=run.quiet_seconds, quiet_until=run.quiet_until)
        )

    async def tick() -> None:
        if not link.unsent:
            send_state()

    async def obey() -> None:
        while True:
            match await messages.get():
                case wire.Request(what="drain"):
                    run.drain()
                case wire.Request(reason=StopReason() as reason):
                    run.signal(reason)
                case wire.Request(what="ask stacks"):
                    link.send(wire.RunStacks(stacks=within_bounds(of_run(run))))

    database = Database(settings.database_dsn(), statement_timeout=settings.statement_timeout)
    sessions = Sessions(database.url, worker_id=order.worker_id, size=1)
    services = LeaseServices(
        worker_id=order.worker_id,
        settings=settings,
        contents=contents,
        database=database,
        sessions=sessions,
        events=Events(),
        loop=asyncio.get_running_loop(),
        on_quiet=send_state,
        kinds=order.kinds,
    )
    ticks = Loop("tick", tick, interval=settings.watchdog_timeout / _TICKS_A_TIMEOUT, died=_end)
    ticks.start()
    obeying = asyncio.create_task(obey(), name="obey the owner")
    ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    run.task = asyncio.create_task(_attempt(run, services, ended), name="the job")
    await asyncio.wait({run.task})  # it may end cancelled by what the job has left behind
    outcome = ended.result()
    obeying.cancel()
    await _flush(kind)  # before it is reported: the owner ends this process as soon as it knows
    child_jobs = [] if run.child_jobs is None else run.child_jobs.jobs
    link.send(wire.RunEnded(outcome=outcome, completed=run.completed, child_jobs=child_jobs))
    await link.flush()
    os._exit(0)  # threads of the job may never end, and nothing waits for them here


def _end(*_: object) -> NoReturn:
    """End at once: the owner has gone, and with it the right to go on, or it cannot be reached."""
    os._exit(1)


async def _flush(kind: Kind) -> None:
    """Write out what the job has printed, logged and traced; what no reader takes within seconds is left.

    A middleware that holds something back has a function ``flush``, which gets the seconds that it may take.
    """

    def flush_output() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # the job may have closed or replaced it
                stream.flush()

    own = ThreadPoolExecutor()  # the event loop's may be full of threads of the job that never end
    holding: list[Callable[[float], object]] = [tracing.flush, drain_logs]
    holding += [each.flush for each in kind.middleware if hasattr(each, "flush")]
    tasks: list[Callable[[], object]] = [*(partial(each, _FLUSH_SECONDS) for each in holding), flush_output]
    flushing = [asyncio.get_running_loop().run_in_executor(own, task) for task in tasks]
    await asyncio.wait(flushing, timeout=_FLUSH_SECONDS)


async def _attempt(run: Run, services: LeaseServices, ended: "asyncio.Future[Outcome]") -> None:
    # Only from here on may a signal cancel the task: one that never began would have no outcome.
    run.phase = Phase.RUNNING

    async def work() -> Outcome:
        if run.stop is not None:
            return stopped(run)
        run.job = open_job(run, services)
        await run.kind.processor.setup()
        try:
            with tracing.within(TraceContext(run.claimed.traceparent, run.claimed.tracestate)):
                return await process_job(run, run.job, services)
        finally:
            await run.kind.processor.teardown()

    outcome, _ = await judged(run, work())
    run.phase = Phase.SETTLING
    ended.set_result(outcome)


if __name__ == "__main__":
    main()
