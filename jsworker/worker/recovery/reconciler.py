"""Startup reconciliation: jobs of earlier lives of this host are taken back at once, on evidence of death."""

from collections.abc import Callable, Collection
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.transitions import reset, workers
from jsworker.worker.context import WorkerContext
from jsworker.worker.recovery.evidence import death_of
from jsworker.worker.recovery.reports import report

FORGOTTEN_AFTER_SECONDS: Final = 86_400.0
"""A worker that has been silent for a day, and holds nothing, is of interest to nobody."""


class Reconciler:
    """Finds the dead of this host and takes their jobs back, again and again for one statement time-out.

    Again, because a CLAIM may still be on its way to the database when its process dies.
    """

    def __init__(
        self, context: WorkerContext, *, siblings: Collection[str], done: Callable[[], None]
    ) -> None:
        """Prepare the reconciliation.

        Args:
            context: the worker's.
            siblings: workers whose jobs the common parent takes back: it knows which of them had begun. What
                it has left at the end of that time is taken back all the same.
            done: called when nothing is left to do.
        """
        self._context = context
        self._siblings = siblings
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
                self._until = boottime() + self._context.settings.statement_timeout
            for owner, proof in self._dead.items():
                if last or owner not in self._siblings:
                    await self._take_back(owner, proof)
            if last:
                await workers.bury(self._context.database, ids=list(self._dead))
                await workers.forget_workers(self._context.database, silent_for=FORGOTTEN_AFTER_SECONDS)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            return
        if last:
            self._context.events.emit("reconcile.completed", jobs=self._jobs, workers=sorted(self._dead))
            self._done()

    async def _find_the_dead(self) -> dict[str, str]:
        lives = await workers.earlier_lives(self._context.database, worker=self._context.me)
        proofs = {life.id: death_of(life, self._context.me) for life in lives}
        return {owner: proof for owner, proof in proofs.items() if proof is not None}

    async def _take_back(self, owner: str, proof: str) -> None:
        taken = await reset.reset_dead(
            self._context.database,
            worker_id=self._context.me.id,
            owner=owner,
            reason=f"worker {owner} has ended: {proof}",
            in_line=self._in_line,
        )
        resets = await report(
            taken,
            cause="dead",
            events=self._context.events,
            refused_rows=self._context.refused_rows,
            on_requeued=self._context.requeued.notify,
        )
        self._jobs += len(resets)
