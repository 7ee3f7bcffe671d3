"""Watches from another thread for what takes too long: a step of the start, or the event loop."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.tracebacks import frames_of_task, frames_of_thread, innermost
from jsworker.worker.context import WorkerContext
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.supervision import Silence

_SLOW_SECONDS: Final = 10.0
_ROUNDS_A_TIMEOUT: Final = 4
_LONGEST_ROUND_SECONDS: Final = 1.0
_BLOCKED_SECONDS: Final = 5.0
_MOST_FRAMES: Final = 30
LAG_SECONDS: Final = 0.25
_LAG_WINDOW_SECONDS: Final = 15.0


@contextmanager
def reported_while_slow(report: Callable[..., None], **facts: object) -> Iterator[None]:
    """Report that the block has taken 10 seconds, and again whenever that time has doubled.

    ``report`` is called from another thread with the facts, the seconds, and the place in the code.
    """
    thread, task, loop = threading.get_ident(), None, None
    with suppress(RuntimeError):  # no event loop yet: the block runs in this thread
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
    began, over = boottime(), threading.Event()

    def watch() -> None:
        due = _SLOW_SECONDS
        while not over.wait(began + due - boottime()):
            due *= 2
            runs = task is None or asyncio.current_task(loop) is task
            frames = frames_of_thread(thread) if task is None or runs else frames_of_task(task)[0]
            report(**facts, seconds=round(boottime() - began), place=innermost(frames))

    threading.Thread(target=watch, name="jsworker slow start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Watchdog:
    """Measures how late the event loop is, and reports from another thread what blocks it.

    Attributes:
        blocked_seconds: the seconds for which the loop has been blocked; 0 unless that is too long.
    """

    def __init__(self, context: WorkerContext, quiet: QuietPhases) -> None:
        self._events = context.events
        self._timeout = context.settings.watchdog_timeout
        self._quiet = quiet
        self._window_ends_at = 0.0
        self._due_at = math.inf
        self._longest = self._longest_before = 0.0
        self._rounds = 0
        self._silence = Silence(self._timeout)
        self._over = threading.Event()
        self.blocked_seconds = 0.0

    @property
    def lag(self) -> float:
        """The longest delay in the present and the previous window of 15 s; grows while the loop is late."""
        return max(0.0, self._longest_before, self._longest, boottime() - self._due_at)

    async def step(self) -> None:
        """Measure how late this round of the loop is; the next one is due after ``LAG_SECONDS``."""
        now = boottime()
        self._rounds += 1
        self._longest = max(self._longest, now - self._due_at)
        if now >= self._window_ends_at:
            self._window_ends_at = now + _LAG_WINDOW_SECONDS
            self._longest_before, self._longest = self._longest, 0.0
        self._due_at = now + LAG_SECONDS

    def start(self, *, supervised: bool) -> None:
        """Watch the loop that runs in this thread; ``supervised``: a supervisor kills it after the time-out.

        A blocked loop is reported after 5 seconds, and again whenever that time has doubled.
        """
        watching = (threading.get_ident(), supervised)
        threading.Thread(target=self._watch, args=watching, name="jsworker watchdog", daemon=True).start()

    async def stop(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self, thread: int, supervised: bool) -> None:  # noqa: FBT001 -- of Thread's args
        pause = min(_LONGEST_ROUND_SECONDS, self._timeout / _ROUNDS_A_TIMEOUT)
        rounds, report_at = -1, _BLOCKED_SECONDS
        while not self._over.wait(pause):
            if self._rounds != rounds:
                rounds, report_at = self._rounds, _BLOCKED_SECONDS
                self._silence.note_tick()
            self._silence.quiet_until = self._quiet.until
            is_late, was_late = self._silence.pass_round(pause, now=boottime()), self.blocked_seconds > 0
            if self._silence.seconds >= report_at:
                report_at *= 2
                place = innermost(frames_of_thread(thread))
                self._events.emit("loop.blocked", seconds=round(self._silence.seconds), place=place)
            if supervised:
                continue
            self.blocked_seconds = self._silence.seconds if is_late else 0.0
            if is_late and not was_late:
                stack = frames_of_thread(thread)
                reason = f"it has stood still for {self.blocked_seconds:.0f} s, at {innermost(stack)}"
                frames = [
                    f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"
                    for frame in stack
                ]
                self._events.emit(
                    "worker.degraded", what="event loop", reason=reason, stack=frames[-_MOST_FRAMES:]
                )
            elif was_late and not is_late:
                self._events.emit("worker.restored", what="event loop")
