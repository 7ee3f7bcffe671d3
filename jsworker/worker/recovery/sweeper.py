"""The scan for silent owners, whose jobs it takes back by rules 1 and 3 of the protocol."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.reset import Lateness, Suspect, TakenBack
from jsworker.stream.api import ask_each
from jsworker.stream.liveness import Answer
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from jsworker.worker.recovery.resets import report_taken

if TYPE_CHECKING:  # both import runs, whose claims use what is proven here
    from jsworker.worker.heartbeat import Heartbeat
    from jsworker.worker.presence import Presence

_LOOKED_AT = 20_000
"""The most late rows of one scan, the longest overdue first. Rows behind them are watched only once these are
taken back, so it is more than one worker has in hand; to read far more would block the event loop."""
_ASKED_AT_ONCE = 50
_REST = 20  # shorter than for other searches, because jobs of dead owners wait for this one
_FEWEST_OWNERS = 3  # with fewer owners, a mass event looks like a single death
BELIEVED_SECONDS = 86_400.0
"""An answer on NATS replaces heartbeats for at most so long beyond the crash threshold: a client with a
worker's login could answer for a dead worker, or hide that there is no answer. A live owner stops before."""


@dataclass(slots=True)
class _Sighting:
    """A late row since it was first seen. Moments are boot times; infinity: not yet."""

    state: tuple[int, datetime]  # token and last sign of life; if they change, watching starts anew
    at: float
    hold_until: float = 0.0  # before this moment the mass-event brake keeps the row with its owner
    unheard_at: float = math.inf  # when NATS first reported no responders for its owner
    unheard_again: bool = False  # the same was reported again, at least one scan interval later
    crashed_at: float = math.inf  # when it was first seen beyond the crash threshold


@dataclass(frozen=True, slots=True)
class Proof:
    """What one scan has proven."""

    stale: list[Suspect]  # rows that rule 1 allows to take back
    held: int  # the number of rows that the brake has just postponed
    braked: bool  # the brake had postponed some of the stale rows: a mass event


class LateRows:
    """Rows that missed two heartbeats, until they change.

    Two reports of no responders for an owner count only if they are at least a scan interval apart.
    """

    def __init__(self, *, scan_interval: float) -> None:
        self._scan_interval = scan_interval
        self._seen: dict[UUID, _Sighting] = {}
        self.proven: dict[UUID, Suspect] = {}  # stale and not taken back yet; a claim may take them over

    def forget(self) -> None:
        """Forget everything: this worker itself was cut off, so its observations prove nothing."""
        self._seen.clear()
        self.proven.clear()

    def look(self, lateness: Lateness, *, now: float) -> Proof:
        """Note the late rows of this scan and return those that have been late for long enough.

        A row must be seen unchanged for a third of its threshold on this worker's own clock, the last time
        beyond the threshold: then a jump of the database's clock, or an outage that silenced every owner,
        resets no job of a live owner. If more than half of at least three owners are late when a row turns
        stale, the row gets one more threshold. This counts late owners, not stale ones, because owners that
        fall silent together turn stale at different moments of a heartbeat interval.
        """
        before, self._seen = self._seen, {}
        for row in lateness.suspects:
            state = row.fencing_token, row.last_activity_at
            seen = before.get(row.id)
            if seen is None or seen.state != state:
                seen = _Sighting(state, now)
            seen.crashed_at = min(seen.crashed_at, now) if row.crashed else math.inf
            self._seen[row.id] = seen
        ripe = [row for row in lateness.suspects if self._is_ripe(row, now)]
        is_mass_event = lateness.owners >= _FEWEST_OWNERS and lateness.late_owners > lateness.owners / 2
        held = [row for row in ripe if is_mass_event and not self._seen[row.id].hold_until]
        for row in held:
            self._seen[row.id].hold_until = now + (row.stale_after or 0.0)
        stale = [row for row in ripe if now >= self._seen[row.id].hold_until]
        self.proven = {row.id: row for row in stale}
        braked = any(self._seen[row.id].hold_until for row in stale)
        return Proof(stale, held=len(held), braked=braked)

    def witnessed(self, rows: Iterable[Suspect], answers: Mapping[str, Answer], *, now: float) -> None:
        """Note the owners' answers: one answer clears a row; a request without any result proves nothing."""
        for row in rows:
            sighting = self._seen[row.id]
            answer = answers.get(row.worker_id, Answer.UNKNOWN)
            if answer is Answer.ALIVE:
                sighting.unheard_at, sighting.unheard_again = math.inf, False
            elif answer is Answer.NO_RESPONDERS:
                sighting.unheard_again |= sighting.unheard_at <= now - self._scan_interval
                sighting.unheard_at = min(sighting.unheard_at, now)

    def crashed(self, rows: Iterable[Suspect]) -> list[Suspect]:
        """Return rows beyond their crash threshold whose owner twice had no responders on NATS."""
        return [row for row in rows if row.crashed and self._seen[row.id].unheard_again]

    def silent_for_too_long(self, rows: Iterable[Suspect], *, now: float) -> list[Suspect]:
        """Return rows that are beyond their crash threshold for so long that answers no longer count."""
        since = now - BELIEVED_SECONDS
        return [row for row in rows if row.crashed and self._seen[row.id].crashed_at <= since]

    def taken_back(self, ids: Iterable[UUID]) -> None:
        """Forget rows that have been taken back or decided otherwise."""
        for job_id in ids:
            self.proven.pop(job_id, None)

    def _is_ripe(self, row: Suspect, now: float) -> bool:
        watched = now - self._seen[row.id].at
        return row.stale and row.stale_after is not None and watched >= row.stale_after / 3


class Sweeper:
    """Watches late rows and takes back those whose owners are proven to be gone.

    While this worker's own heartbeats fail, the silence of others proves nothing.
    """

    def __init__(
        self, context: WorkerContext, *, heartbeat: "Heartbeat", presence: "Presence", late: LateRows
    ) -> None:
        self._context = context
        self._heartbeat_interval = context.settings.heartbeat_interval
        self._heartbeat = heartbeat
        self._presence = presence
        self._late = late
        self._search = ThrottledScan(context, "silent owners", rest=_REST)
        self._rules = context.settings.recovers_by()

    async def step(self) -> None:
        """Check every late row once, and take back those that are proven to have no live owner."""
        now = boottime()
        if self._heartbeat.answered_for() < 2 * self._heartbeat_interval:
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
                await self._take_back_stale(proof, lateness)
            else:
                self._late.proven.clear()  # claims must not take them over either
            if self._rules["crashed"]:
                await self._take_back_crashed(lateness)

    async def _look(self, seconds: float) -> Lateness:
        return await reset.look_for_late(
            self._context.database,
            heartbeat_interval=self._heartbeat_interval,
            limit=_LOOKED_AT,
            seconds=seconds,
            past_refused=self._context.refused_rows.any_of("reset"),
        )

    async def _take_back_stale(self, proof: Proof, lateness: Lateness) -> None:
        if proof.held:
            reason = "more than half of the owners are late; what has turned stale gets one more threshold"
            self._context.events.emit("stale.detected", jobs=proof.held, held=True, reason=reason)
        owners = _by_owner(proof.stale)
        counted = {owner for owner, rows in owners.items() if not self._has_a_cause(proof, lateness, rows)}
        # A claim that takes a row over counts a stall, so rows without a stall go through the queue.
        self._late.taken_back(row.id for row in proof.stale if row.uncounted or row.worker_id not in counted)
        for owner, rows in owners.items():
            self._context.events.emit("stale.detected", jobs=len(rows), owners=[owner])
            taken = await reset.reset_stale(
                self._context.database,
                worker_id=self._context.worker_id,
                stale=rows,
                reason=f"worker {owner} stopped responding",
                counted=owner in counted,
            )
            await self._report(taken, "stale")

    def _has_a_cause(self, proof: Proof, lateness: Lateness, rows: Sequence[Suspect]) -> bool:
        """Return whether something else may have silenced the owner, so that no stall is counted."""
        threshold = max(row.stale_after or 0.0 for row in rows)
        return proof.braked or self._database_was_away(lateness, threshold)

    def _database_was_away(self, lateness: Lateness, seconds: float) -> bool:
        return lateness.database_up_for < seconds or self._heartbeat.had_a_gap_within(seconds)

    async def _take_back_crashed(self, lateness: Lateness) -> None:
        asked = [row for row in lateness.suspects if row.answers and row.crash_after is not None]
        # Across a cut of the cluster, only owners on the side without the quorum stop their runs in time.
        if not asked or not await self._presence.is_with_quorum():
            return
        asked_at = boottime()  # not the start of the scan: the two requests must be a scan interval apart
        owners = {row.worker_id for row in asked}
        answers = await ask_each(self._presence.ask, owners, at_once=_ASKED_AT_ONCE)
        self._late.witnessed(asked, answers, now=asked_at)
        unanswered = self._late.crashed(asked)
        await self._take_back_silent(lateness, unanswered, "and does not answer")
        too_long = self._late.silent_for_too_long(asked, now=asked_at)
        why = "for so long that no answer stands for its heartbeats any more"
        await self._take_back_silent(lateness, [row for row in too_long if row not in unanswered], why)

    async def _take_back_silent(self, lateness: Lateness, crashed: Sequence[Suspect], why: str) -> None:
        for owner, rows in _by_owner(crashed).items():
            taken = await reset.reset_crashed(
                self._context.database,
                worker_id=self._context.worker_id,
                crashed=rows,
                reason=f"worker {owner} fell silent {why}",
                # It may have been stopped meanwhile, and could not note that.
                counted=not self._database_was_away(lateness, max(row.silent_for for row in rows)),
            )
            await self._report(taken, "crashed")

    async def _report(self, taken: TakenBack, cause: str) -> None:
        self._late.taken_back(job.id for job in taken.resets)
        await report_taken(self._context, taken, cause=cause)


def _by_owner(rows: Iterable[Suspect]) -> dict[str, list[Suspect]]:
    grouped: defaultdict[str, list[Suspect]] = defaultdict(list)
    for row in rows:
        grouped[row.worker_id].append(row)
    return dict(grouped)
