"""The scan for silent owners: their jobs are taken back by rules 1 and 3 of the protocol."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from jsworker.core.clock import boottime
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.reset import Lateness, Suspect, TakenBack
from jsworker.stream.liveness import Answer
from jsworker.worker.context import WorkerContext
from jsworker.worker.heartbeat import Heartbeat
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from jsworker.worker.presence import Presence
from jsworker.worker.recovery.late_rows import LateRows, Proof
from jsworker.worker.recovery.resets import report_taken

_LOOKED_AT = 5000
"""Late rows of one scan; those that are overdue for longest come first, the others with the next scan."""
_ASKED_AT_ONCE = 50
_REST = 20
"""Shorter than that of other searches: jobs of the dead wait for this one."""


class Sweeper:
    """Watches late rows and takes back those whose owners are proven to be gone.

    While its own heartbeats are not answered, no other worker's silence proves anything.
    """

    def __init__(
        self, context: WorkerContext, *, heartbeat: Heartbeat, presence: Presence, late: LateRows
    ) -> None:
        self._context = context
        self._heartbeat_interval = context.settings.heartbeat_interval
        self._heartbeat = heartbeat
        self._presence = presence
        self._late = late
        self._search = ThrottledScan(context, "silent owners", rest=_REST)
        self._rules = context.settings.recovers_by()

    async def step(self) -> None:
        """Look at every late row once, and take back what is proven to have no live owner."""
        now = boottime()
        if self._heartbeat.heard_for() < 2 * self._heartbeat_interval:
            self._late.forget()
            return
        if not self._search.is_due:
            return
        with self._context.health.noting():
            lateness = await self._search.make(self._look)
            if lateness is None:
                return
            proof = self._late.look(lateness, now=now)
            if self._rules["stale"]:
                self._report_brake(proof)
                await self._take_back_stale(proof, lateness)
            else:
                self._late.proven.clear()  # nor is a claim to take them
            if self._rules["crashed"]:
                await self._take_back_crashed(lateness.suspects)

    async def _look(self, seconds: float) -> Lateness:
        return await reset.look_for_late(
            self._context.database,
            heartbeat_interval=self._heartbeat_interval,
            limit=_LOOKED_AT,
            seconds=seconds,
            past_refused=self._context.refused_rows.any_of("reset"),
        )

    def _report_brake(self, proof: Proof) -> None:
        if proof.held:
            reason = "more than half of the owners are late; what has turned stale gets one more threshold"
            self._context.events.emit("stale.detected", jobs=proof.held, held=True, reason=reason)

    async def _take_back_stale(self, proof: Proof, lateness: Lateness) -> None:
        counts = {
            owner: not proof.braked and not self._has_a_cause(lateness, rows)
            for owner, rows in _by_owner(proof.stale).items()
        }
        # A claim straight from the owner counts the stall: what is no stall goes by the queue.
        self._late.taken_back(row.id for row in proof.stale if row.in_line or not counts[row.worker_id])
        for owner, rows in _by_owner(proof.stale).items():
            self._context.events.emit("stale.detected", jobs=len(rows), owners=[owner])
            counted = counts[owner]
            reason = f"worker {owner} stopped responding"
            taken = await reset.reset_stale(
                self._context.database,
                worker_id=self._context.worker_id,
                stale=rows,
                reason=reason,
                counted=counted,
            )
            await self._report(taken, "stale")

    def _has_a_cause(self, lateness: Lateness, rows: Sequence[Suspect]) -> bool:
        """Return whether something else may have silenced the owner: then no stall is counted."""
        threshold = max(row.stale_after or 0.0 for row in rows)
        return lateness.database_up_for < threshold or self._heartbeat.had_a_gap_within(threshold)

    async def _take_back_crashed(self, suspects: Sequence[Suspect]) -> None:
        asked = [row for row in suspects if row.answers and row.crash_after is not None]
        if not asked:
            return
        asked_at = boottime()  # not when the scan began: two answers must be a scan apart themselves
        answers = await self._ask({row.worker_id for row in asked})
        self._late.witnessed(asked, answers, now=asked_at)
        unanswered = self._late.crashed(asked)
        too_long = [
            row for row in self._late.silent_for_too_long(asked, now=asked_at) if row not in unanswered
        ]
        for found, why in (
            (unanswered, "and nobody answers for it"),
            (too_long, "for so long that no answer stands for its heartbeats any more"),
        ):
            for owner, rows in _by_owner(found).items():
                taken = await reset.reset_crashed(
                    self._context.database,
                    worker_id=self._context.worker_id,
                    crashed=rows,
                    reason=f"worker {owner} fell silent {why}",
                )
                await self._report(taken, "crashed")

    async def _report(self, taken: TakenBack, cause: str) -> None:
        self._late.taken_back(job.id for job in taken.resets)
        await report_taken(self._context, taken, cause=cause)

    async def _ask(self, owners: Iterable[str]) -> Mapping[str, Answer]:
        at_once = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def ask(owner: str) -> tuple[str, Answer]:
            async with at_once:
                return owner, await self._presence.ask(owner)

        return dict(await asyncio.gather(*(ask(owner) for owner in owners)))


def _by_owner(rows: Iterable[Suspect]) -> dict[str, list[Suspect]]:
    grouped: defaultdict[str, list[Suspect]] = defaultdict(list)
    for row in rows:
        grouped[row.worker_id].append(row)
    return dict(grouped)
