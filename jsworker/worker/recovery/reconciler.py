"""Startup reconciliation: jobs of earlier lives of this host are taken back at once, on evidence of death."""

from collections.abc import Callable, Collection
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset, workers
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.workers import WorkerRow
from jsworker.worker.health import DatabaseHealth
from jsworker.worker.recovery.evidence import death_of
from jsworker.worker.recovery.reports import report

FORGOTTEN_AFTER_SECONDS: Final = 86_400.0
"""A worker that has been silent for a day, and holds nothing, is of interest to nobody."""


class Reconciler:
    """Finds the dead of this host and takes their jobs back, again and again for one statement time-out.

    Again, because a CLAIM may still be on its way to the database when its process dies.
    """

    def __init__(
        self,
        *,
        worker: WorkerRow,
        siblings: Collection[str],
        statement_timeout: float,
        database: Database,
        health: DatabaseHealth,
        refused_rows: RefusedRows,
        events: Events,
        on_requeued: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """Wire the reconciler.

        Args:
            worker: this worker.
            siblings: workers whose jobs the common parent takes back: it knows which of them had begun. What
                it has left at the end of that time is taken back all the same.
            statement_timeout: seconds for which a statement of the dead may still be executed.
            database, health, refused_rows, events: the worker's own.
            on_requeued: called when jobs went back to the queue.
            done: called when nothing is left to do.
        """
        self._worker = worker
        self._siblings = siblings
        self._statement_timeout = statement_timeout
        self._database = database
        self._health = health
        self._refused_rows = refused_rows
        self._events = events
        self._on_requeued = on_requeued
        self._done = done
        self._dead: dict[str, str] | None = None
        self._in_line: reset.InLine = {}
        self._until = 0.0
        self._jobs = 0

    async def step(self) -> None:
        """Take back what the dead hold; the last round begins one statement time-out after the first look."""
        last = self._dead is not None and boottime() >= self._until
        try:
            if self._dead is None:
                self._dead = await self._find_the_dead()
                self._until = boottime() + self._statement_timeout
            for owner, proof in self._dead.items():
                if last or owner not in self._siblings:
                    await self._take_back(owner, proof)
            if last:
                await workers.mark_stopped(self._database, ids=list(self._dead))
                await workers.forget_workers(self._database, silent_for=FORGOTTEN_AFTER_SECONDS)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)
            return
        if last:
            self._events.emit("reconcile.completed", jobs=self._jobs, workers=sorted(self._dead))
            self._done()

    async def _find_the_dead(self) -> dict[str, str]:
        lives = await workers.earlier_lives(self._database, worker=self._worker)
        proofs = {life.id: death_of(life, self._worker) for life in lives}
        return {owner: proof for owner, proof in proofs.items() if proof is not None}

    async def _take_back(self, owner: str, proof: str) -> None:
        taken = await reset.reset_dead(
            self._database,
            worker_id=self._worker.id,
            owner=owner,
            reason=f"worker {owner} has ended: {proof}",
            in_line=self._in_line,
        )
        resets = await report(
            taken,
            cause="dead",
            events=self._events,
            refused_rows=self._refused_rows,
            on_requeued=self._on_requeued,
        )
        self._jobs += len(resets)
