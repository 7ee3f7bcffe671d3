"""The way in: deliveries of one kind become claims, in natural batches, and claims become runs."""

import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from uuid import UUID

from jsworker.batcher import Batcher
from jsworker.events import Events
from jsworker.ownership.claim import ClaimedJob, RefusedJob
from jsworker.runtime.claimer import Claimer, Take
from jsworker.runtime.clock import boottime
from jsworker.runtime.dead_letters import DeadLetters
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.kinds import Kind
from jsworker.runtime.run import Claiming, Hand, Run, Stop
from jsworker.runtime.slots import Slots
from jsworker.stream.delivery import Delivery, Undecodable

_CLAIM_BATCH = 500
_ANOTHER_COPY_DELAY = 1.0
_DATABASE_DELAY = 2.0
_NO_ROW_DELAY = 5.0
_NO_ROW_SECONDS = 60.0
"""A message may overtake its row's commit by this much; after that nobody will ever commit it."""


class Consumer:
    """Deliveries of one kind on their way to a job slot.

    Attributes:
        kind: the kind.
        delivered_at: boot time at which the last message of this kind arrived.
        delivered_seq: number of the last message that was delivered for the first time: those of this kind
            before it have been delivered to somebody.
        put_off: jobs found in the table whose claim was refused by the server, or not answered.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        claimer: Claimer,
        health: DatabaseHealth,
        hand: Hand,
        slots: Slots,
        dead_letters: DeadLetters,
        events: Events,
        on_room: Callable[[], None],
        died: Callable[[str, BaseException], None],
    ) -> None:
        self.kind = kind
        self.delivered_at = boottime()
        self.delivered_seq = 0
        self.put_off: set[UUID] = set()
        self._claimer = claimer
        self._health = health
        self._hand = hand
        self._slots = slots
        self._dead_letters = dead_letters
        self._events = events
        self._on_room = on_room
        self._claiming = 0
        self._welcome = 0
        """How many more deliveries there was room for at the last look; looked at anew with every batch."""
        self._batches: Batcher[UUID, None] = Batcher(
            f"claims of {kind.name}", self._claim, limit=_CLAIM_BATCH, died=died
        )

    def room(self) -> int:
        """Return how many more messages are wanted now."""
        if not self._health.up:
            return 0
        return self._slots.room(self.kind, claiming=len(self._hand.claiming), claiming_kind=self._claiming)

    def most(self) -> int:
        """Return how many jobs of this kind may be in hand at once now, if no other kind has any."""
        return self._slots.most(self.kind)

    def deliver(self, delivery: Delivery) -> None:
        """Take a message: claim its job, unless this process has it in hand already."""
        self.delivered_at = boottime()
        if delivery.is_first:
            self.delivered_seq = delivery.stream_seq
        run = self._hand.runs.get(delivery.job_id)
        if run is not None:
            self._answer_copy(delivery, run.claimed.dispatch)
        elif delivery.job_id in self._hand.claiming:
            self._hand.claiming[delivery.job_id].deliveries.append(delivery)
        elif self._welcome <= 0 and not self._make_welcome():
            delivery.nak()
        else:
            self._begin(delivery.job_id, [delivery])

    def take(self, job_id: UUID) -> None:
        """Claim a job that was found in the table, if there is room and it is not in hand already."""
        if job_id not in self._hand and self.room() > 0:
            self._begin(job_id, [])

    def undecodable(self, message: Undecodable) -> None:
        """Take a message that cannot be read: kept for people, then terminated."""
        self._dead_letters.bury(message, message.reason)

    async def flush(self) -> None:
        """Wait until every claim on its way is decided."""
        await self._batches.flush()
        # Claims that died undecided: their messages would wait out ack_wait.
        mine = [job_id for job_id, claim in self._hand.claiming.items() if claim.kind == self.kind.name]
        self._put_off(mine)

    async def close(self) -> None:
        """Give up claims on their way."""
        await self._batches.close()

    def _make_welcome(self) -> bool:
        room = self.room()
        # Other kinds take from the same room, so that with several each message is a look of its own.
        self._welcome = room if self._slots.serve_one_kind else min(room, 1)
        return room > 0

    def _begin(self, job_id: UUID, deliveries: list[Delivery]) -> None:
        self._welcome -= 1
        self._hand.claiming[job_id] = Claiming(self.kind.name, deliveries)
        self._claiming += 1
        self._batches.post(job_id)

    async def _claim(self, ids: Sequence[UUID]) -> Sequence[None]:
        self._welcome = 0
        started = boottime()
        self._decide(await self._claimer.take(ids), started)
        if refused := self._undecided(ids):
            self._decide(await self._claimer.take_from_stale_owners(refused), started)
            await self._skip(self._undecided(refused))
        self._on_room()  # what was refused makes room, and no run will tell
        return [None] * len(ids)

    def _undecided(self, ids: Sequence[UUID]) -> list[UUID]:
        return [job_id for job_id in ids if job_id in self._hand.claiming]

    def _decide(self, take: Take, started: float) -> None:
        self._adopt(take.claimed, started)
        self._put_off(take.unclear)

    def _adopt(self, claimed: Sequence[ClaimedJob], started: float) -> None:
        """Take claimed jobs in hand; each row's last sign of life is as old as the claim may be, at most."""
        tell = self._events.wants("job.claimed")
        now = boottime()
        for row in claimed:
            deliveries = self._let_go(row.id)
            delivery = deliveries[0] if deliveries else None
            run = Run(row, self.kind, delivery, beaten_at=started, now=now)
            self._hand.runs[row.id] = run
            for copy in deliveries[1:]:
                self._answer_copy(copy, row.dispatch)
            if row.cancel_requested:
                run.signal(Stop.CANCELLED)
            if tell:
                self._events.emit("job.claimed", **run.facts(), waited=row.waited)
            self._slots.add(run)

    async def _skip(self, ids: Sequence[UUID]) -> None:
        """Skip and ack what others own or what has ended; whoever owns a row covers it with its sweeps."""
        delivered = [job_id for job_id in ids if self._hand.claiming[job_id].deliveries]
        for job_id in set(ids).difference(delivered):  # nobody waits for an answer
            self._let_go(job_id)
        if not delivered:
            return
        rows = await self._claimer.look_at_refused(delivered)
        if rows is None:
            self._put_off(delivered)
            return
        for job_id in delivered:
            row = rows.get(job_id)
            for delivery in self._let_go(job_id):
                self._answer_refused(delivery, row)

    def _answer_refused(self, delivery: Delivery, row: RefusedJob | None) -> None:
        if row is None:
            self._answer_without_row(delivery)
        elif row.status == "queued" and row.dispatch <= delivery.dispatch:
            # Queued again between the claim and this look: the message may be its only one.
            delivery.nak(_jittered(_DATABASE_DELAY))
        else:
            delivery.ack()
            facts = {"job_id": str(delivery.job_id), "kind": self.kind.name}
            self._events.emit("job.skipped", **facts, status=row.status, owner=row.worker_id)

    def _put_off(self, ids: Iterable[UUID]) -> None:
        for job_id in ids:
            deliveries = self._let_go(job_id)
            if not deliveries:
                self.put_off.add(job_id)
            for delivery in deliveries:
                delivery.nak(_jittered(_DATABASE_DELAY))

    def _answer_copy(self, copy: Delivery, claimed_at_dispatch: int) -> None:
        """Ack a copy that the run in hand has used up; a newer one may be the job's only message."""
        if copy.dispatch <= claimed_at_dispatch:
            copy.ack()
        else:
            copy.nak(_jittered(_ANOTHER_COPY_DELAY))

    def _answer_without_row(self, delivery: Delivery) -> None:
        if (datetime.now(UTC) - delivery.stored_at).total_seconds() < _NO_ROW_SECONDS:
            delivery.nak(_NO_ROW_DELAY)
        else:
            self._dead_letters.bury(delivery, "no job of this kind has this id")

    def _let_go(self, job_id: UUID) -> list[Delivery]:
        self._claiming -= 1
        return self._hand.claiming.pop(job_id).deliveries


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311 -- spreads load, hides nothing
