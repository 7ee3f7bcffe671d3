"""The identity of this process, and the evidence that earlier lives of a worker have ended (rule 2)."""

import asyncio
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from jsworker import __version__
from jsworker.core.clock import boottime
from jsworker.core.errors import SettingsError
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.workers import EarlierLife, WorkerRow
from jsworker.stream.liveness import Answer
from jsworker.worker.context import WorkerContext
from jsworker.worker.presence import Presence
from jsworker.worker.recovery.resets import DeadOwners
from jsworker.worker.supervision import DeadOwner

FORGOTTEN_AFTER_SECONDS: Final = 86_400.0  # a silent worker without jobs is deleted from the registry

_MISSED_HEARTBEATS: Final = 4
"""A worker with a duplicate id that is silent for more than so many of its own heartbeat intervals counts as
gone. ``Heartbeat`` sometimes skips one on purpose; two more may be missed."""
_ENDING_SECONDS: Final = 15.0
"""A worker with a duplicate id that drains may take so long, beyond its time-outs, until it has ended. One
whose supervisor was killed has this time, too."""
_LOOKS_PER_INTERVAL: Final = 4
_PROC: Final = Path("/proc")
_ENDED = frozenset("ZX")  # a zombie has ended; only its parent has not reaped it


def identify(settings: Settings, kinds: Sequence[str]) -> WorkerRow:
    """Return this process's row of the registry, with what ``/proc`` tells of it.

    Its id is the configured id, or else ``hostname-pid``, with a random end.
    """
    hostname, pid = settings.hostname, os.getpid()
    return WorkerRow(
        id=f"{settings.worker_id or f'{hostname}-{pid}'}-{secrets.token_hex(4)}",
        hostname=hostname,
        pod_uid=settings.pod_uid,
        container=settings.container,
        boot_id=_known(lambda: (_PROC / "sys/kernel/random/boot_id").read_text().strip()),
        pid_namespace=_known(_pid_namespace),
        pid=pid,
        process_started=_known(partial(start_of, pid)),
        kinds=kinds,
        concurrency=settings.concurrency,
        version=__version__,
        heartbeat_interval=settings.heartbeat_interval,
    )


def _known(read: Callable[[], str | None]) -> str | None:
    try:
        return read()
    except OSError:
        return None  # without /proc there is no such evidence; rules 1 and 3 find the dead by their silence


def _pid_namespace() -> str | None:
    """Return this process's PID namespace; None if ``/proc`` shows the processes of another one."""
    shows_this_one = str((_PROC / "self").readlink()) == str(os.getpid())
    return str((_PROC / "self/ns/pid").readlink()) if shows_this_one else None


def start_of(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None if it does not run in this PID namespace.

    Raises:
        OSError: it cannot be read, which says nothing about the process.
    """
    try:
        stat = (_PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        raise  # it exists, and /proc hides it
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in _ENDED else fields[18]


def _clock_offsets(process: int | str) -> str | None:
    """Return how far the clocks of a process are shifted; None: not at all, or there is no such process."""
    try:
        return (_PROC / f"{process}/timens_offsets").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def death_of(earlier: EarlierLife, me: WorkerRow) -> str | None:
    """Return the proof, in words, that an earlier life has ended; None if it may be alive.

    An equal name is no proof. It is proven if its process is gone from this same PID namespace, or if this
    container has replaced the container of the earlier life in the same pod. What cannot be read proves
    nothing, neither of the earlier life nor of this one.
    """
    if None in (me.boot_id, me.pid_namespace, earlier.boot_id, earlier.pid_namespace):
        return None
    if (earlier.boot_id, earlier.pid_namespace) == (me.boot_id, me.pid_namespace):
        return _end_of_process(earlier)
    same_container = (earlier.pod_uid, earlier.container) == (me.pod_uid, me.container)
    if same_container and me.pod_uid is not None and me.container is not None:
        return f"container {me.container} of this pod was started anew"
    return None


class Reconciler:
    """Startup reconciliation: takes back the jobs of earlier lives at once, on evidence of death.

    The common parent takes back the jobs of ``siblings``, because it knows which of them had begun; jobs that
    it has left after one statement time-out are taken back here. ``done`` is called when all is done.

    A life that another container of this name is said to have replaced, and which answers by ``presence``,
    keeps its jobs: two containers of the pod have the same name.
    """

    def __init__(
        self,
        context: WorkerContext,
        dead_owners: DeadOwners,
        *,
        presence: Presence,
        siblings: Collection[str],
        done: Callable[[], None],
    ) -> None:
        self._context = context
        self._presence = presence
        self._dead_owners = dead_owners
        self._siblings = siblings
        self._done = done

    async def step(self) -> None:
        """Find dead owners and take back their jobs; without a database the next step tries again."""
        me = self._context.me
        with self._context.health.noting():
            lives = await workers.earlier_lives(self._context.database, worker=me)
            settled_at = boottime() + self._context.settings.statement_timeout
            alive = await self._alive_by_their_answer(lives)
            dead = [
                DeadOwner(
                    worker_id=life.id,
                    reason=f"worker {life.id} has ended: {proof}",
                    settled_at=settled_at,
                    # A worker that was killed while it was being stopped was not killed by its jobs.
                    counted=life.state != workers.DRAINING,
                )
                for life in lives
                if life.id not in alive and (proof := death_of(life, me)) is not None
            ]
            jobs = await asyncio.gather(*(self._take_back(each) for each in dead))
            with self._context.health.noting():  # if this fails, the next start forgets them
                await workers.forget_workers(self._context.database, silent_for=FORGOTTEN_AFTER_SECONDS)
            ended = sorted(each.worker_id for each in dead)
            self._context.events.emit("reconcile.completed", jobs=sum(jobs), workers=ended)
            self._done()

    async def _alive_by_their_answer(self, lives: Sequence[EarlierLife]) -> set[str]:
        me = self._context.me
        here = (me.boot_id, me.pid_namespace)
        others = [each for each in lives if (each.boot_id, each.pid_namespace) != here]
        by_name = [each.id for each in others if death_of(each, me) is not None]
        answers = await asyncio.gather(*(self._presence.answered_by(each) for each in by_name))
        alive = [each for each, answer in zip(by_name, answers, strict=True) if answer is Answer.ALIVE]
        if alive:
            reason = f"JSWORKER_CONTAINER={me.container} is also that of worker {alive[0]}, which is alive"
            self._context.events.emit("worker.degraded", what="container name", reason=reason)
        return set(alive)

    async def _take_back(self, dead: DeadOwner) -> int:
        if dead.worker_id in self._siblings:
            await asyncio.sleep(dead.settled_at - boottime())
        return await self._dead_owners.reset(dead)


async def refuse_live_duplicate(context: WorkerContext, *, name: str, presence: Presence) -> None:
    """Wait until no other live worker has this name: the configured id, without the random end.

    If a worker of this name has crashed and its death is not proven, this waits until it counts as gone, so
    that its successor does not crash in a loop. One that drains gets the time to end. Names decide nothing
    about jobs: ids end at random.

    Raises:
        SettingsError: another worker with this name is alive.
    """
    settings = context.settings
    ending_seconds = settings.shutdown_timeout + 2 * settings.statement_timeout + _ENDING_SECONDS
    ends_by: dict[str, float] = {}
    first_seen: dict[str, EarlierLife] = {}
    unchanged_since: dict[tuple[str, datetime], float] = {}

    def is_silent(life: EarlierLife) -> bool:
        # By its own clock too: a heartbeat lies ahead if the database's clock was ahead and is corrected.
        watched = boottime() - unchanged_since.setdefault((life.id, life.last_seen_at), boottime())
        return max(life.seconds_silent, watched) > _MISSED_HEARTBEATS * life.heartbeat_interval

    def is_ending(life: EarlierLife) -> bool:
        is_draining = life.state == workers.DRAINING
        return is_draining and boottime() < ends_by.setdefault(life.id, boottime() + ending_seconds)

    while True:
        others = [
            life
            for life in await workers.duplicates(context.database, worker=context.me, name=name)
            if life.started_before and not is_silent(life) and death_of(life, context.me) is None
        ]
        if not others:
            return
        for life in others:
            before = first_seen.setdefault(life.id, life)
            if is_ending(life):
                continue
            beats = life.last_seen_at > before.last_seen_at
            if beats or await presence.answered_by(life.id) is Answer.ALIVE:
                raise SettingsError(
                    f"JSWORKER_WORKER_ID={name} must be another one: worker {life.id} has it and is alive, "
                    f"pid {life.pid} on host {life.hostname}"
                )
        # Without it, the next worker of this name would count this one as gone.
        await workers.seen(context.database, context.me, state="running")
        await asyncio.sleep(min(life.heartbeat_interval for life in others) / _LOOKS_PER_INTERVAL)


def _end_of_process(earlier: EarlierLife) -> str | None:
    try:
        started = start_of(earlier.pid)
        if started is not None and (
            earlier.process_started in (None, started)
            # The start is shown by the reader's clock, and the process has noted it by its own.
            or _clock_offsets(earlier.pid) != _clock_offsets("self")
        ):
            return None
    except OSError:
        return None
    return f"process {earlier.pid} of this host is gone"
