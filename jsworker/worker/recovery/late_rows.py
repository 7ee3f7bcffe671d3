"""Late rows as this worker has seen them, on its own clock: the memory behind rules 1 and 3."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from jsworker.ownership.transitions.reset import Lateness, Suspect
from jsworker.stream.liveness import Answer

_FEWEST_OWNERS = 3
"""With fewer a mass event looks like a single death."""

BELIEVED_SECONDS: Final = 86_400.0
"""So long beyond the crash threshold an answer on NATS stands for heartbeats: a client with a worker's login
can answer for a dead worker, or hide that there is no answer. The owner stops before."""


@dataclass(slots=True)
class _Sighting:
    """A late row as it was first seen. Moments are boot times; None: it has not happened.

    Attributes:
        at: the first sighting.
        hold_until: before it, the brake forbids to take the row back.
        unheard_at: its owner was first found without responders.
        unheard_again: whether that was confirmed, at least one scan later.
        crashed_at: the first sighting beyond the crash threshold.
    """

    fencing_token: int
    last_activity_at: datetime
    at: float
    hold_until: float = 0.0
    unheard_at: float | None = None
    unheard_again: bool = False
    crashed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """What one look has proven.

    Attributes:
        stale: rows that rule 1 gives free.
        held: how many the brake has just put off.
        braked: whether the brake has held any of the stale ones before: a mass event.
    """

    stale: list[Suspect]
    held: int
    braked: bool


class LateRows:
    """Rows that missed two heartbeats, until they move. Two witnesses are at least a scan interval apart.

    Attributes:
        proven: rows that are proven stale and not taken back yet, by job id; a claim may take them.
    """

    def __init__(self, *, scan_interval: float) -> None:
        self._scan_interval = scan_interval
        self._seen: dict[UUID, _Sighting] = {}
        self.proven: dict[UUID, Suspect] = {}

    def forget(self) -> None:
        """Forget everything: this worker itself was deaf, so nothing that it saw proves anything."""
        self._seen.clear()
        self.proven.clear()

    def look(self, lateness: Lateness, *, now: float) -> Proof:
        """Note the late rows of this scan and return those that have been late for long enough.

        A row must be seen unchanged for a third of its threshold on this worker's own clock, the last time
        beyond the threshold: a jump of the database's clock, or an outage that silenced every owner, then
        resets no job of a live owner. When more than half of at least three owners are late when a row turns
        stale, it gets one more threshold: it is likelier that something else has happened than that so many
        have died. Late, not stale: owners that fall silent together turn stale over a whole heartbeat
        interval.
        """
        self._seen = {row.id: self._sighting(row, now) for row in lateness.suspects}
        ripe = [row for row in lateness.suspects if self._is_ripe(row, now)]
        fresh = [row for row in ripe if not self._seen[row.id].hold_until]
        held = fresh if fresh and self._is_mass_event(lateness.suspects, lateness.owners) else []
        for row in held:
            self._seen[row.id].hold_until = now + (row.stale_after or 0.0)
        stale = [row for row in ripe if now >= self._seen[row.id].hold_until]
        self.proven = {row.id: row for row in stale}
        braked = any(self._seen[row.id].hold_until for row in stale)
        return Proof(stale, held=len(held), braked=braked)

    def witnessed(self, rows: Iterable[Suspect], answers: Mapping[str, Answer], *, now: float) -> None:
        """Note what was heard of the owners of late rows; silence says nothing, one answer clears a row."""
        for row in rows:
            sighting = self._seen[row.id]
            answer = answers.get(row.worker_id, Answer.UNKNOWN)
            if answer is Answer.ALIVE:
                sighting.unheard_at, sighting.unheard_again = None, False
            elif answer is Answer.NO_RESPONDERS:
                sighting.unheard_again |= _is_past(sighting.unheard_at, now - self._scan_interval)
                if sighting.unheard_at is None:
                    sighting.unheard_at = now

    def crashed(self, rows: Iterable[Suspect]) -> list[Suspect]:
        """Return rows beyond their crash threshold whose owner two witnesses found gone."""
        return [row for row in rows if row.crashed and self._seen[row.id].unheard_again]

    def silent_for_too_long(self, rows: Iterable[Suspect], *, now: float) -> list[Suspect]:
        """Return rows that stayed beyond their crash threshold for so long that no answer counts any more."""
        return [
            row
            for row in rows
            if row.crashed and _is_past(self._seen[row.id].crashed_at, now - BELIEVED_SECONDS)
        ]

    def taken_back(self, ids: Iterable[UUID]) -> None:
        """Forget rows that have been decided."""
        for job_id in ids:
            self.proven.pop(job_id, None)

    def _sighting(self, row: Suspect, now: float) -> _Sighting:
        before = self._seen.get(row.id)
        if before is not None and (before.fencing_token, before.last_activity_at) == (
            row.fencing_token,
            row.last_activity_at,
        ):
            seen = before
        else:
            seen = _Sighting(row.fencing_token, row.last_activity_at, now)
        if not row.crashed:
            seen.crashed_at = None
        elif seen.crashed_at is None:
            seen.crashed_at = now
        return seen

    def _is_ripe(self, row: Suspect, now: float) -> bool:
        return (
            row.stale and row.stale_after is not None and now - self._seen[row.id].at >= row.stale_after / 3
        )

    def _is_mass_event(self, late: Collection[Suspect], owners: int) -> bool:
        late_owners = len({row.worker_id for row in late})
        return owners >= _FEWEST_OWNERS and late_owners > owners / 2


def _is_past(at: float | None, latest: float) -> bool:
    return at is not None and at <= latest
