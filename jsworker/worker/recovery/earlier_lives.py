"""Who this process is, and which earlier lives of a worker have ended: evidence of death (rule 2)."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
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

FORGOTTEN_AFTER_SECONDS: Final = 86_400.0  # of a worker that holds nothing: it is deleted from the registry

_MISSED_HEARTBEATS: Final = 4
"""After so many of its own intervals without a sign of life a worker with a duplicate id counts as gone. One
is left out on purpose now and then (``Heartbeat``); two may be missed beside it."""
_LOOKS_PER_INTERVAL: Final = 4
_PROC: Final = Path("/proc")
_ENDED = frozenset("ZX")  # a zombie waits only for its parent to take note


def identify(settings: Settings, kinds: Sequence[str]) -> WorkerRow:
    """Return this process's row of the registry: ``hostname-pid-random`` and what ``/proc`` tells of it."""
    hostname, pid = settings.hostname or socket.gethostname(), os.getpid()
    return WorkerRow(
        id=f"{settings.worker_id or f'{hostname}-{pid}'}-{secrets.token_hex(4)}",
        hostname=hostname,
        pod_uid=settings.pod_uid,
        container=settings.container,
        boot_id=_known((_PROC / "sys/kernel/random/boot_id").read_text),
        pid_namespace=_known((_PROC / "self/ns/pid").readlink),
        pid=pid,
        process_started=start_of(pid),
        kinds=kinds,
        concurrency=settings.concurrency,
        version=__version__,
        heartbeat_interval=settings.heartbeat_interval,
    )


def _known(read: Callable[[], object]) -> str | None:
    try:
        return str(read()).strip()
    except OSError:
        return None  # no /proc: no evidence of this sort; silence (rules 1 and 3) covers it


def start_of(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None: it does not run in this PID namespace."""
    try:
        stat = (_PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in _ENDED else fields[18]


def death_of(earlier: EarlierLife, me: WorkerRow) -> str | None:
    """Return how an earlier life is proven to have ended, None when it may be alive.

    A name proves nothing. Proof is the process that is gone from this very PID namespace, or the end of the
    container that this one has replaced in its own pod.
    """
    if me.boot_id is None or me.pid_namespace is None:
        return None
    if (earlier.boot_id, earlier.pid_namespace) == (me.boot_id, me.pid_namespace):
        return _end_of_process(earlier)
    same_container = (earlier.pod_uid, earlier.container) == (me.pod_uid, me.container)
    if same_container and me.pod_uid is not None and me.container is not None:
        return f"container {me.container} of this pod was started anew"
    return None


class Reconciler:
    """Startup reconciliation: takes back the jobs of earlier lives at once, on evidence of death.

    The jobs of ``siblings`` the common parent takes back, who knows which of them had begun; what it has left
    after one statement time-out is taken back all the same. ``done`` is called when nothing is left to do.
    """

    def __init__(
        self,
        context: WorkerContext,
        dead_owners: DeadOwners,
        *,
        siblings: Collection[str],
        done: Callable[[], None],
    ) -> None:
        self._context = context
        self._dead_owners = dead_owners
        self._siblings = siblings
        self._done = done

    async def step(self) -> None:
        """Find the dead and take back what they hold; without a database the next step tries again."""
        me = self._context.me
        with self._context.health.noting():
            lives = await workers.earlier_lives(self._context.database, worker=me)
            settled_at = boottime() + self._context.settings.statement_timeout
            dead = [
                DeadOwner(life.id, f"worker {life.id} has ended: {proof}", settled_at)
                for life in lives
                if (proof := death_of(life, me)) is not None
            ]
            jobs = await asyncio.gather(*(self._take_back(each) for each in dead))
            with self._context.health.noting():  # else the next start forgets them
                await workers.forget_workers(self._context.database, silent_for=FORGOTTEN_AFTER_SECONDS)
            ended = sorted(each.worker_id for each in dead)
            self._context.events.emit("reconcile.completed", jobs=sum(jobs), workers=ended)
            self._done()

    async def _take_back(self, dead: DeadOwner) -> int:
        if dead.worker_id in self._siblings:
            await asyncio.sleep(dead.settled_at - boottime())
        return await self._dead_owners.reset(dead)


async def refuse_live_duplicate(context: WorkerContext, *, name: str, presence: Presence) -> None:
    """Wait until no other live worker has this name: the id that was set, without its random end.

    A worker of this name that crashed without evidence of its death is waited for, so that its successor does
    not crash in a loop: names decide nothing about jobs, their ids end at random.

    Raises:
        SettingsError: another worker with this name is alive.
    """
    first_seen: dict[str, EarlierLife] = {}
    while True:
        others = [
            life
            for life in await workers.duplicates(context.database, worker=context.me, name=name)
            if life.started_before
            and life.seconds_silent <= _MISSED_HEARTBEATS * life.heartbeat_interval
            and death_of(life, context.me) is None
        ]
        if not others:
            return
        for life in others:
            before = first_seen.setdefault(life.id, life)
            beats = life.last_seen_at > before.last_seen_at
            if beats or await presence.answered_by(life.id) is Answer.ALIVE:
                raise SettingsError(
                    f"JSWORKER_WORKER_ID={name} must be another one: worker {life.id} has it and is alive, "
                    f"pid {life.pid} on host {life.hostname}"
                )
        # Else the next worker of this name would take this one for gone.
        await workers.seen(context.database, context.me, state="running")
        await asyncio.sleep(min(life.heartbeat_interval for life in others) / _LOOKS_PER_INTERVAL)


def _end_of_process(earlier: EarlierLife) -> str | None:
    started = start_of(earlier.pid)
    if started is not None and (earlier.process_started is None or started == earlier.process_started):
        return None
    if started is None and _is_hidden(earlier.pid):
        return None
    return f"process {earlier.pid} of this host is gone"


def _is_hidden(pid: int) -> bool:
    """Return whether a process may be there that ``/proc`` hides because another user owns it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False  # one's own show: this one is a zombie, if it is there
