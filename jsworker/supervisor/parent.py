"""The parent: starts children, passes signals on, kills what hangs, restarts what died."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.exit_codes import FAILED, WRONG_USAGE
from jsworker.core.settings import Settings
from jsworker.supervisor import messages
from jsworker.supervisor.child_process import Child, Death, KillReason, reap_orphans
from jsworker.supervisor.child_start import DUMP_SIGNAL
from jsworker.supervisor.children import FleetView, Place, show_work
from jsworker.supervisor.dead_children import DeadChildren
from jsworker.supervisor.process_exit import EXIT_SECONDS
from jsworker.telemetry.logs import log_events, own_logger
from jsworker.worker.supervision import DeadOwner

CONNECT_SECONDS: Final = 10.0
"""The first child of each place gives up reaching its servers after so long."""

_MARGIN_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 0.2
_LAST_SIGNS_SECONDS: Final = 0.2
"""Between the dump of a hung child's stacks and SIGKILL."""
_ROUNDS_A_TIMEOUT: Final = 10
_SHORTEST_ROUND_SECONDS: Final = 0.05
_LONGEST_ROUND_SECONDS: Final = 0.5
_ASLEEP_ROUNDS: Final = 10
_OWN_ENDS: Final = frozenset(
    -number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
)
"""Exit codes of a process that crashed by its own doing, even if the parent stood still meanwhile."""


class Supervisor:
    """The parent of ``PROCESSES`` workers; to be run in the main thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        connect_seconds: float = CONNECT_SECONDS,
        shows_work: bool = False,
    ) -> None:
        """Prepare a supervisor; nothing starts yet.

        ``command`` and ``environment`` are passed to ``Child``. The first child of each place gives up after
        ``connect_seconds`` if it cannot reach its servers; later ones keep trying. With ``shows_work`` a line
        on the terminal shows the progress.
        """
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._new_child = partial(Child, command, settings, environment=environment, on_message=self._note)
        numbers = range(1, settings.processes + 1)
        self._places = [Place(number, settings.heartbeat_interval) for number in numbers]
        self._deaths: Counter[Death] = Counter()
        self._dead = DeadChildren(settings, on_requeued=self._wake_children)
        round_seconds = settings.watchdog_timeout / _ROUNDS_A_TIMEOUT
        self._round_seconds = min(_LONGEST_ROUND_SECONDS, max(_SHORTEST_ROUND_SECONDS, round_seconds))
        self._over = asyncio.Event()
        self._signals = 0
        self._stopping = False
        self._code = 0
        self._words: str | None = None
        self._woke_at, self._paused = -_MARGIN_SECONDS, 0.0
        self._ended_before = 0  # runs of children that have died
        self._shows_work = shows_work
        self._logger = own_logger()

    async def run(self) -> tuple[int, str | None]:
        """Supervise until a signal stops it or no child can work.

        Returns the exit code, and the error of a child that could not work; None if a signal stopped it.
        """
        log_events(self._dead.events, worker_id=self._dead.worker_id)
        async with AsyncExitStack() as last:
            await self._serve(last)
            if self._shows_work:
                last.callback(asyncio.create_task(show_work(self._work)).cancel)
            return await self._supervise()

    def view(self) -> FleetView:
        """Return the present state of all children."""
        now = boottime()
        places = [place.view(now) for place in self._places]
        return FleetView(places, self._stopping, self._deaths, now, dict(self._dead.stalls))

    async def _serve(self, last: AsyncExitStack) -> None:
        """Serve probes and metrics if a port is set; otherwise do not load their libraries."""
        host, port = self._settings.http_host, self._settings.http_port
        if port is None:
            return
        from jsworker.supervisor.probes import routes  # noqa: PLC0415 -- see above
        from jsworker.telemetry.http import HttpServer  # noqa: PLC0415 -- see above

        server = HttpServer(routes(self.view))
        self._logger.info("http.listening", host=host, port=await server.open(host, port))
        last.push_async_callback(server.close)

    async def _supervise(self) -> tuple[int, str | None]:
        self._loop = asyncio.get_running_loop()
        self._heard_at = boottime()
        self._listen_to_signals()
        try:
            for place in self._places:
                self._start(place)
            self._round = self._loop.call_later(self._round_seconds, self._go_round)
            await self._over.wait()
            self._round.cancel()
            await self._dead.finish(2 * self._settings.statement_timeout + _MARGIN_SECONDS)
        finally:
            for child in self._children():
                child.link.close()
        return self._code, self._words

    def _listen_to_signals(self) -> None:
        """Install handlers before the first child starts; process 1 gets no signal without a handler."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # started by nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_stop_signal, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def _note(self, child: Child, message: messages.FromChild) -> None:
        match message:
            case messages.Ready(kinds=kinds):
                self._places[child.number - 1].was_ready = True
                self._dead.expect(kinds)
                seconds = round(boottime() - child.started_at, 3)
                self._logger.info("child.started", **child.facts(), seconds=seconds)
            case messages.Registered():
                for other in self._children():
                    if other is not child:
                        other.send(message)
            case messages.KillRequest(culprits=culprits, reason=reason):
                if child.kill_reason is None:
                    ids = tuple(job_id for job_id, _ in culprits)
                    named = [str(job_id) for job_id in ids]
                    self._logger.warning("child.stop_ignored", **child.facts(), reason=reason, culprits=named)
                    counted = not self._stopping
                    child.kill_reason = KillReason("stop_ignored", reason, counted, ids if counted else ())
                child.send_signal(signal.SIGKILL)

    def _start(self, place: Place) -> None:
        place.restart = None
        place.generation += 1
        try:
            place.child = self._new_child(
                connect_seconds=self._connect_seconds if place.generation == 1 else None,
                number=place.number,
                generation=place.generation,
            )
        except OSError as error:  # out of memory or process ids, which may pass
            self._logger.warning("child.not_started", child=place.number, reason=str(error))
            self._restart_later(place, place.restart_delay(0.0, worked=False))
            return
        # The parent takes back the jobs of dead siblings; the new child must not, even if it finds them dead.
        siblings = [other.worker_id for other in self._children() if other.worker_id is not None]
        for worker_id in [*siblings, *self._dead.waiting()]:
            place.child.send(messages.Registered(worker_id=worker_id))

    def _restart_later(self, place: Place, seconds: float) -> None:
        if seconds:
            self._logger.info("child.restart_delayed", child=place.number, seconds=round(seconds, 2))
            place.restart = self._loop.call_later(seconds, self._start, place)
        else:
            self._start(place)

    def _children(self) -> list[Child]:
        return [place.child for place in self._places if place.child is not None]

    def _work(self) -> tuple[int, int | None]:
        """Return the numbers of runs that have ended and of running jobs; None if that is unknown."""
        children = self._children()
        begun = [child.begun.read() for child in children]
        running = None if None in begun else sum(len(jobs) for jobs in begun if jobs is not None)
        return self._ended_before + sum(child.begun.ended for child in children), running

    def _wake_children(self) -> None:
        for child in self._children():
            if child.ready:
                child.send(messages.Wake())

    def _go_round(self) -> None:
        """Kill children that are silent for too long; read first, because the parent may have stood still."""
        self._round = self._loop.call_later(self._round_seconds, self._go_round)
        now = boottime()
        if self._stood_still():
            self._woke_at, self._paused = now, now - self._heard_at
        self._heard_at = now
        for child in self._children():
            child.link.hear()
            if child.silence.pass_round(self._round_seconds, now=now) and child.kill_reason is None:
                self._kill_hung(child)
        self._reap()

    def _kill_hung(self, child: Child) -> None:
        self._logger.error("child.hung", **child.facts(), silent_seconds=round(child.silence.seconds, 2))
        reason = f"its process was killed: the event loop stood still for {child.silence.timeout:g} s"
        child.kill_reason = KillReason("hung", reason, counted=not self._stopping)
        # Not at once: the stacks go to the same stderr and would split the log line.
        self._loop.call_later(_LINE_SECONDS, child.send_signal, DUMP_SIGNAL)
        self._loop.call_later(_LINE_SECONDS, child.send_signal, signal.SIGTERM)
        self._loop.call_later(_LINE_SECONDS + _LAST_SIGNS_SECONDS, child.send_signal, signal.SIGKILL)

    def _reap(self) -> None:
        for place in self._places:
            child = place.child
            if child is not None and (code := child.exit_code) is not None:
                place.child = None
                self._ended_before += child.begun.ended
                child.close()
                self._note_death(place, child, code)
        if os.getpid() == 1 and hasattr(os, "waitid"):
            reap_orphans([child.pid for child in self._children()])
        if self._stopping and not self._children():
            self._over.set()

    def _note_death(self, place: Place, child: Child, code: int) -> None:
        unfit = not child.ready and (code == WRONG_USAGE or (code > 0 and child.generation == 1))
        # If others work, it may be able to soon: a file is being replaced, for example.
        alone = not any(other.ready and not other.stopped for other in self._children())
        # A process that was asked to stop and holds no jobs may already have removed its signal handlers.
        well = self._stopping and (code == 0 or (code == -signal.SIGTERM and not child.holds_jobs))
        if not well and not (unfit and alone):
            log = self._logger.error if unfit else self._logger.warning
            reason, pause = child.last_words, self._pause()
            if reason is None and code == FAILED and pause > self._settings.watchdog_timeout:
                reason = (
                    f"its supervisor stood still for {pause:.0f} s: a process that stands still, too, "
                    "ends itself, after twice JSWORKER_WATCHDOG_TIMEOUT at the latest"
                )
            log("child.died", **child.facts(), how=child.ending(), reason=reason)
            if not self._stopping:
                ended_by_itself: Death = "killed" if code < 0 else "exited"
                self._deaths[child.kill_reason.how if child.kill_reason else ended_by_itself] += 1
        self._take_back_jobs_of(child)
        if self._stopping:
            self._code = self._code or int(not well)
        elif unfit and alone:
            if any(each.was_ready for each in self._places):
                # At once, because its words are shown at the end.
                self._logger.error("supervisor.stopping", **child.facts(), reason=child.last_words)
            self._code = WRONG_USAGE if code == WRONG_USAGE else 1
            self._words = child.last_words
            self._stop(force=False)
        else:
            lived = boottime() - child.started_at
            self._restart_later(place, place.restart_delay(lived, worked=child.ready))

    def _take_back_jobs_of(self, child: Child) -> None:
        if child.worker_id is None or not child.holds_jobs:
            return
        if not self._settings.recovers_by()["supervisor"]:
            reason = f"JSWORKER_RECOVERY={self._settings.recovery}: by other rules, or by hand"
            self._logger.warning("dead_owner.not_reset", **child.facts(), reason=reason)
            return
        # If the parent stood still until a moment ago, the whole machine probably did. Perhaps because a job
        # took all memory, for which the kernel kills: jobs of a killed process are innocent only once.
        innocent = self._stopping or (self._pause() > 0.0 and child.exit_code not in _OWN_ENDS)
        reason = f"its process ended: {child.ending()}"
        kill = child.kill_reason or KillReason("killed", reason, counted=not innocent)
        in_flight = 0.0 if child.stopped else self._settings.statement_timeout
        counted, culprits = kill.counted, kill.culprits
        was_killed = child.exit_code is not None and child.exit_code < 0
        is_suspect = counted or (was_killed and not self._stopping)
        if is_suspect and not culprits and (begun := child.begun.read()) is not None:
            # Only a job that had begun can have ended the process.
            counted, culprits = counted and bool(begun), begun
        dead = DeadOwner(child.worker_id, kill.reason, boottime() + in_flight, counted, culprits)
        able = [each for each in self._children() if each.ready and not (each.stopped or each.kill_reason)]
        asks_sibling = bool(able) and not self._stopping and len(culprits) <= messages.MOST_CULPRITS
        if asks_sibling:  # a sibling is connected and has loaded SQLAlchemy, so it is quicker
            min(able, key=lambda each: each.silence.seconds).send(messages.TakeBack(dead=dead))
        self._dead.add(dead, asked_sibling=asks_sibling)

    def _stood_still(self) -> bool:
        return boottime() - self._heard_at > _ASLEEP_ROUNDS * self._round_seconds

    def _pause(self) -> float:
        """Return for how many seconds the parent stood still until a moment ago; 0: it did not."""
        now = boottime()
        if self._stood_still():
            return now - self._heard_at
        return self._paused if now - self._woke_at < _MARGIN_SECONDS else 0.0

    def _on_stop_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        force = self._signals > 1
        _, running = self._work()
        reason = _waiting_for(running, self._settings.shutdown_timeout, force=force)
        self._logger.info("supervisor.stopping", signal=number.name, force=force, jobs=running, reason=reason)
        self._stop(force=force)

    def _stop(self, *, force: bool) -> None:
        self._stopping = True
        for place in self._places:
            if place.restart is not None:
                place.restart.cancel()
        for child in self._children():
            child.stop(force=force)
        seconds = 2 * self._settings.statement_timeout + EXIT_SECONDS + _MARGIN_SECONDS
        seconds += 0 if force else self._settings.shutdown_timeout
        self._loop.call_later(seconds, self._kill_the_rest)
        self._reap()

    def _kill_the_rest(self) -> None:
        for child in self._children():
            self._logger.error("child.killed", **child.facts(), reason="it did not end in time")
            child.send_signal(signal.SIGKILL)


def _waiting_for(running: int | None, seconds: float, *, force: bool) -> str:
    if running == 0:
        return "no job is running"
    jobs = "jobs" if running is None else f"{running} job{'' if running == 1 else 's'}"
    return f"handing {jobs} back" if force else f"waiting up to {seconds:g} s for {jobs}; again to force"
