"""Workflows: finishes batches whose last member has ended, and wakes or cancels the nodes that need them."""

import asyncio
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.ownership.transitions import workflow_control, workflows
from jsworker.ownership.transitions.workflows import Advanced
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ThrottledScan

_REST: Final = 10.0
"""After a look that finished nothing, a rest of so many times its length: many workers may share a batch."""
_LONGEST_REST_SECONDS: Final = 0.1
_REFUSED: Final = "rows of workflows and batches"


class WorkflowSweep:
    """Finishes the batches of this worker's own jobs at once, and once a scan those that others left."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._search = ThrottledScan(context, "unfinished batches")
        self._is_to_sweep = True
        self._after: UUID | None = None  # the last sweep has looked at the ids up to this one
        self._has_refused = False

    def sweep_soon(self) -> None:
        """Let the next step look for all batches and workflows left undone, by any worker."""
        self._is_to_sweep = True

    async def step(self) -> None:
        """Finish batches that ended here since the last step; after ``sweep_soon``, all left undone."""
        while self._context.health.up:
            await self._finish_own()
            if not (self._is_to_sweep and self._search.is_due):
                return
            self._is_to_sweep = False
            with self._context.noting("workflows"):
                await self._sweep()
            if not self._is_to_sweep:
                return

    async def _finish_own(self) -> None:
        context = self._context
        touched = {batch for batch in context.batches.take() if not context.in_flight.has_member_of(batch)}
        try:
            with context.noting("workflows"):
                if touched:
                    began = boottime()
                    advanced = await workflows.advance(
                        context.database, touched, refused_rows=context.refused_rows
                    )
                    took, touched = boottime() - began, set()
                    self._report(advanced)
                    if not advanced.batches:
                        await asyncio.sleep(min(_REST * took, _LONGEST_REST_SECONDS))
        finally:
            context.batches.put_back(touched)  # unanswered or refused

    async def _sweep(self) -> None:
        """Do what one answer has; the next sweep goes on behind it, as all of its rows may be refused."""
        context = self._context
        left = await self._search.make(
            lambda seconds: workflows.left_undone(context.database, after=self._after, seconds=seconds)
        )
        if left is None:
            return
        if self._after is None:
            self._has_refused = False
        self._after = left.more_after
        if any(left):
            advanced = await workflows.advance(
                context.database,
                left.batches,
                needs=left.needs,
                workflows=left.workflows,
                refused_rows=context.refused_rows,
            )
            self._report(advanced)
            self._has_refused = self._has_refused or bool(advanced.refused)
        if self._after is not None:
            self._is_to_sweep = True
            self._search.hurry()
        elif not self._has_refused:
            context.complaints.end(_REFUSED)
        for workflow in left.cancelled:  # its cancellation was interrupted, or members were added
            await workflow_control.cancel_left(context.database, workflow)

    def _report(self, advanced: Advanced) -> None:
        events = self._context.events
        for batch in advanced.batches:
            facts = {"batch": str(batch.id), "workflow": str(batch.workflow), "name": batch.name}
            events.emit("batch.finished", **facts, kind=batch.kind, outcome=batch.outcome)
        for workflow in advanced.workflows:
            facts = {"workflow": str(workflow.id), "name": workflow.name, "outcome": workflow.outcome}
            events.emit("workflow.finished", **facts, batches=workflow.batches, seconds=workflow.seconds)
        if advanced.refused:  # only the first is reported: otherwise all of them would be remembered for ever
            refused, error = advanced.refused[0]
            self._context.complaints.report(_REFUSED, f"among others {refused}: {error}")
        if advanced.woken:
            self._context.requeued.notify()
