"""Intake: deliveries of one kind become claims, in natural batches, and claims become runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime, jittered
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, LockTimeout
from jsworker.core.priorities import NORMAL
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import admission, waiting_keys
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.claim import ClaimedJob, RefusedJob, Taken
from jsworker.ownership.transitions.reset import Suspect
from jsworker.stream.message import Delivery, Undecodable, consumer_of
from jsworker.stream.puller import Puller
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.dead_letters import DeadLetters
from jsworker.worker.pipeline.in_flight import Claiming, Run, StopReason
from jsworker.worker.pipeline.kinds import AdmissionState, Kind
from jsworker.worker.pipeline.slots import Slots
from jsworker.worker.pipeline.unclear_claims import read_back
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.resets import report_taken_over
from jsworker.worker.recovery.sweeper import LateRows

MOST_AT_ONCE = 500
_LEAST_SURPLUS = 8
_MOST_LOCKED = 10_000
_ANOTHER_COPY_DELAY = 1.0
_COPY_DELAY_DOUBLINGS = 6
_MOST_COPIES = 10  # deliveries that wait for one claim; more are put back, because they take no room
_MOST_UNUSABLE = 100  # messages that are not stored yet as dead letters; with so many no more are pulled
_DATABASE_DELAY = 2.0
_REFUSED_DELAY = 60.0
_JITTER = 0.5  # the share by which delays of messages vary
_LOCKED_PAUSE = 0.005
_LOCKED_TRIES = 40  # early tries for a locked row; the MARK of a relay holds the lock for milliseconds
# After those, one try waits for the lock: of a row that many producers debounce, it is never free.
_LOCKED_LONGEST_DELAY = 60.0
_NO_ROW_DELAY = 5.0
_NO_ROW_SECONDS = 60.0  # a message may come so much earlier than the commit of its row, but not more


class Consumer:
    """Takes the deliveries of one kind and priority; ``claim`` is called with each batch of jobs."""

    puller: Puller  # set once both are made, for it pulls what this has room for

    def __init__(
        self,
        context: WorkerContext,
        kind: Kind,
        *,
        slots: Slots,
        dead_letters: DeadLetters,
        late: LateRows,
        quiet: QuietPhases,
        claim: Callable[["Consumer", Sequence[UUID]], Awaitable[None]],
        admit: Callable[["Consumer", Collection[str]], Awaitable[None]],
        state: AdmissionState,
        priority: int = NORMAL,
    ) -> None:
        self.kind = kind
        self.priority = priority
        self.name = consumer_of(kind.name, priority)
        self.state = state
        self.has_rows = False  # whether rows were found in the table that are not claimed yet
        self._had_more = False  # whether the stream had more messages when the last one came
        self._admit = admit
        self.delivered_at = boottime()  # when the last message came whose job has a row
        self.delivered_seq = 0  # number of the last first delivery; earlier messages were delivered, too
        self.put_off: set[UUID] = set()  # jobs found in the table whose claim was refused or not answered
        self._context = context
        self._in_flight = context.in_flight
        self._slots = slots
        self._dead_letters = dead_letters
        self._late = late
        self._quiet = quiet
        self._claim = claim
        self.claiming = 0
        """The number of jobs that are being claimed, and for which there is room."""
        self.surplus = 0
        """The number of others that are being claimed."""
        self._most_surplus = 0
        self._unusable = 0
        self._waiting_for_locks = 0
        self._room = 0  # for more deliveries, at the last check; checked again with every batch
        self._batches: Batcher[UUID, None] = Batcher(
            f"claims of {self.name}", self._claim_batch, limit=MOST_AT_ONCE, died=context.died
        )
        self._locked: Batcher[UUID, None] = Batcher(
            f"locked rows of {self.name}", self._claim_locked, limit=MOST_AT_ONCE, died=context.died
        )
        self._awaited: Batcher[UUID, None] = Batcher(
            f"awaited rows of {self.name}", self._claim_awaited, limit=1, died=context.died
        )
        self._freed: Batcher[str, None] = Batcher(
            f"freed keys of {self.name}", self._take_freed, limit=MOST_AT_ONCE, died=context.died
        )

    def room(self) -> int:
        """Return how many more messages are wanted now."""
        return self._slots.room(self) if self._is_open else 0

    def wanted(self) -> int:
        """Return how many more messages to ask for.

        After messages of keys that are full, more and more besides those for which there is room: else the
        jobs of other keys behind very many of these would wait until a slot has taken each of them in turn.
        """
        room = self.room()
        return room + self._most_surplus if room > 0 else room

    def waiting(self) -> int:
        """Return the number of runs that wait for a slot, behind which messages may wait, too.

        For a limited kind this is 0: when a slot becomes free, held jobs take the room that is left.
        """
        return 0 if self.state.is_limited else self._slots.waiting(self)

    @property
    def _is_open(self) -> bool:
        rests = self.state.is_paused or self._slots.is_drained or self._context.files.are_exhausted
        return not rests and self._context.health.up and self._unusable < _MOST_UNUSABLE

    def gives_way(self) -> float:
        """Return for how many seconds only jobs of higher priority should be asked for."""
        return self._slots.gives_way(self)

    @property
    def has_more(self) -> bool:
        """Whether there are more jobs, as far as is known, and they may be claimed."""
        if self._had_more and (self.puller.is_dry or not self.puller.is_pulling):
            self._had_more = False
        return self._is_open and (self._had_more or self.has_rows)

    def most(self) -> int:
        """Return how many jobs of this kind may be in flight if no other kind has any."""
        return self._slots.most(self.kind)

    def deliver(self, delivery: Delivery) -> None:
        """Take a message: claim its job, unless it is in flight already."""
        if delivery.num_delivered == 1:
            self.delivered_seq = delivery.stream_seq
        self._had_more = delivery.pending > 0
        run = self._in_flight.runs.get(delivery.job_id)
        if run is not None:
            _answer_copy(delivery, run.claimed.dispatch)
        elif (claim := self._in_flight.claiming.get(delivery.job_id)) is not None:
            if len(claim.deliveries) < _MOST_COPIES:
                claim.deliveries.append(delivery)
            else:
                _put_off(delivery)
        elif self._room > 0 or self._look_for_room():
            self._begin(delivery.job_id, [delivery])
        elif self.surplus < self._most_surplus and self._is_open:
            self._begin(delivery.job_id, [delivery], is_surplus=True)
        else:
            self._had_more = True
            delivery.nak()

    def take(self, job_id: UUID) -> None:
        """Claim a job that was found in the table, if there is room and it is not in flight already."""
        if job_id not in self._in_flight and self.room() > 0:
            self._begin(job_id, [])

    def free(self, key: str) -> None:
        """Note that a key may have a free slot or token: its held jobs are claimed, or woken for others."""
        self._freed.post(key)

    def keep_unusable(self, message: Delivery | Undecodable, reason: str) -> None:
        """Store a message as a dead letter, then terminate it."""
        self._unusable += 1
        self._dead_letters.keep(message, reason, self._note_kept)

    async def flush(self) -> None:
        """Wait until all claims under way are decided."""
        for claims_under_way in (self._batches, self._locked, self._awaited, self._freed):
            await claims_under_way.flush()
        # Put back messages of claims that stay undecided: they would come again only after ack_wait.
        claims = self._in_flight.claiming.items()
        self._put_off([job_id for job_id, claim in claims if claim.consumer is self])

    async def close(self) -> None:
        """Give up claims under way."""
        for claims_under_way in (self._batches, self._locked, self._awaited, self._freed):
            await claims_under_way.close()

    def _look_for_room(self) -> bool:
        if self._slots.serves_one:
            self._room = self.room()
        else:  # other consumers use the same room, so check it for each message
            self._room = int(self._is_open and self._slots.takes_one(self))
        return self._room > 0

    def _begin(self, job_id: UUID, deliveries: list[Delivery], *, is_surplus: bool = False) -> None:
        self._in_flight.claiming[job_id] = Claiming(self, deliveries, is_surplus)
        if is_surplus:
            self.surplus += 1
            self._in_flight.surplus += 1
        else:
            self._room -= 1
            self.claiming += 1
        self._batches.post(job_id)

    async def _claim_batch(self, ids: Sequence[UUID]) -> None:
        await self._claim(self, ids)

    async def _take_freed(self, keys: Sequence[str]) -> None:
        await self._admit(self, set(keys))

    async def _claim_locked(self, ids: Sequence[UUID]) -> None:
        """Claim jobs whose rows were locked; no statement waits for a lock, so other jobs are not delayed."""
        await asyncio.sleep(_LOCKED_PAUSE)
        self._waiting_for_locks -= len(ids)
        await self._claim_batch(ids)

    async def _claim_awaited(self, ids: Sequence[UUID]) -> None:
        """Claim a job whose row others lock in turn; this waits for its own turn."""
        try:
            await self._claim_batch(ids)
        finally:
            self._in_flight.is_awaiting_lock = False

    async def claim(self, ids: Sequence[UUID]) -> list[Run]:
        """Claim jobs and return the runs of those that were claimed.

        After each unclear answer, half as many jobs are claimed at once, down to a single one; after each
        clear answer, twice as many.
        """
        self._room = 0
        if self._slots.is_drained:  # the worker was drained after the messages came
            self._put_off(ids, 0.0)
            return []
        try:
            aside = await self._context.refused_rows.among("claim", ids)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            self._put_off(ids)
            return []
        self._put_off(aside, _REFUSED_DELAY)
        if not (ids := self.undecided(ids)):  # set aside, or claimed by another lane's admission meanwhile
            return []
        if self._goes_by_admission:
            return await self._admitted(ids)
        self.state.plain_claims += 1
        try:
            claiming = self._in_flight.claiming
            waits = all(claiming[job_id].times_locked > _LOCKED_TRIES for job_id in ids)
            return await self._adopt(partial(claims.claim, self._context.database, ids=ids, waits=waits), ids)
        finally:
            self.state.plain_claims -= 1

    async def claim_freed(self, keys: Collection[str]) -> tuple[list[Run], bool]:
        """Claim held jobs of keys while there is room; return them and whether others may take the rest."""
        runs: list[Run] = []
        room = 0
        if not self._context.health.up:  # the sweep finds them later
            return runs, False
        if self.room() > 0:
            # A job that is being claimed now is not found, but may be held a moment later.
            self.state.freed_meanwhile.update(keys)
            async with self.state.admitting:
                if (room := self.room()) > 0:  # an admission before this one may have used it
                    try:
                        async for some in self._admit_held(list(keys), room):
                            runs += some
                    except RowRefused:  # wake the jobs: the refused one is then claimed alone and set aside
                        room = 0
        if not any(each.consumer.kind is self.kind for each in self._in_flight.claiming.values()):
            self.state.freed_meanwhile.clear()
        is_full = len(runs) >= room
        if self.state.is_rated and not is_full:
            self._context.held.notify()  # the remaining jobs wait for a token, not for a slot
        return runs, is_full

    async def _admit_held(self, keys: Sequence[str], room: int) -> AsyncIterator[list[Run]]:
        """Claim held jobs of keys; an admission locks as many of each of its keys as there is room for."""
        at_once = max(1, _MOST_LOCKED // room)
        for start in range(0, len(keys), at_once):
            if room > 0:
                some = await self._admit_some(keys=keys[start : start + at_once], most=room)
                room -= len(some)
                yield some

    async def _admitted(self, ids: Sequence[UUID]) -> list[Run]:
        """Claim jobs by admission, one call after the other, and return the runs."""
        async with self.state.admitting:
            if not (ids := self.undecided(ids)):  # an earlier admission has claimed them
                return []
            # Jobs that were held before may have been claimed in place of these and use their room.
            with_room = sum(not self._in_flight.claiming[job_id].is_surplus for job_id in ids)
            room = with_room + self._slots.room(self)
            if room <= 0:
                self._put_off(ids, 0.0)
                return []
            runs = await self._admit_some(ids, most=min(len(ids), room))
        if runs:
            self._most_surplus = 0
        elif self.state.is_limited and self.undecided(ids):  # they are held
            self._most_surplus = min(MOST_AT_ONCE, max(_LEAST_SURPLUS, 2 * self._most_surplus))
        return runs

    async def _admit_some(self, ids: Sequence[UUID] = (), **what: Any) -> list[Run]:
        """Claim jobs by the admission that is under way, and return the runs.

        An admission may claim jobs that were not asked for, so a read-back could not tell two of them apart.
        """
        besides = self._in_hand().difference(ids)
        ask = partial(admission.admit, self._context.database, ids=ids, besides=besides, **what)
        return await self._adopt(ask, ids, besides=besides)

    @property
    def _goes_by_admission(self) -> bool:
        """Whether claims go by admission: keys are counted, or one was just freed."""
        return self.state.is_limited or self.state.admitting.locked()

    async def wake(self, keys: Collection[str]) -> None:
        """Queue held jobs of keys that may begin now, for other workers."""
        with self._context.noting(f"held jobs of {self.kind.name}"):
            await wake_held(self._context, self.kind.name, keys)

    def _in_hand(self) -> set[UUID]:
        """Return the jobs of this kind that this process runs or is claiming."""
        running = {job_id for job_id, run in self._in_flight.runs.items() if run.kind is self.kind}
        return running | {
            job_id for job_id, each in self._in_flight.claiming.items() if each.consumer.kind is self.kind
        }

    async def claim_from_stale_owners(self, ids: Sequence[UUID]) -> list[Run]:
        """Claim jobs directly from owners that this worker has proven stale, and return the runs."""
        proven = self._late.proven
        if proven.keys().isdisjoint(ids):
            return []
        async with self.state.admitting if self._goes_by_admission else nullcontext():
            claiming = self._in_flight.claiming
            with_room = [job_id for job_id in self.undecided(ids) if not claiming[job_id].is_surplus]
            seen = [proven[job_id] for job_id in with_room if job_id in proven]
            if not seen:
                return []
            ask = partial(claims.claim_stale, self._context.database, seen=seen)
            return await self._adopt(ask, [row.id for row in seen], seen)

    def undecided(self, ids: Iterable[UUID]) -> list[UUID]:
        """Return the jobs whose claim is neither granted nor given up yet."""
        return [job_id for job_id in ids if job_id in self._in_flight.claiming]

    async def answer_refused(self, ids: Sequence[UUID]) -> None:
        """Acknowledge messages of jobs that other workers own or that have ended: sweeps cover their rows.

        Jobs that are still queued are claimed again: their rows are locked, or were queued just now. Jobs
        that wait behind a running job of their unique key leave the queue.
        """
        if not (ids := self.undecided(ids)):
            return
        came_before = {job_id: len(self._in_flight.claiming[job_id].deliveries) for job_id in ids}
        found = [job_id for job_id in ids if not came_before[job_id]]
        delivered = set(ids).difference(found)
        look = partial(claims.look_at_refused, self._context.database, kind=self.kind.name)
        try:
            # A skip is noted in the timelines only of jobs that came by a message.
            rows = await look(ids=delivered, worker_id=self._context.worker_id) if delivered else {}
            rows |= await look(ids=found) if found else {}
            behind = {job_id for job_id, row in rows.items() if row.status == "behind"}
            behind -= await waiting_keys.defer(self._context.database, behind) if behind else set()
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            self._put_off(ids)
            return
        if not delivered.isdisjoint(rows):
            self.delivered_at = boottime()
        for job_id in self.undecided(ids):
            row = rows.get(job_id)
            if row is not None and row.held_by is not None:
                self._note_held(job_id, row)
                if (key := row.limit_key or "") in self.state.freed_meanwhile:
                    self.state.freed_meanwhile.discard(key)
                    self.free(key)
            if row is not None and (row.status == "queued" or job_id in behind):
                self.state.is_limited |= row.limit_key is not None
                if self._in_flight.claiming[job_id].is_surplus:
                    self._put_off([job_id], 0.0)
                else:
                    self._claim_again(job_id)
            else:
                deliveries = self._let_go(job_id)
                for delivery in deliveries[: came_before[job_id]]:
                    self._answer_refused(delivery, row)
                for copy in deliveries[came_before[job_id] :]:  # the row may have been read before them
                    _answer_copy(copy, row.dispatch if row is not None else 0)

    async def _adopt(
        self,
        ask: Callable[..., Awaitable[Taken]],
        ids: Sequence[UUID],
        seen: Sequence[Suspect] = (),
        besides: Collection[UUID] | None = None,
    ) -> list[Run]:
        """Claim by ``ask`` and return the runs; after a lost answer, read back which jobs were claimed.

        ``besides``: for an admission, the jobs that were in flight before.
        """
        started, quiet = boottime(), self._quiet.seconds_left
        limits = self.kind.limits_when_quiet(quiet)
        try:
            taken = await ask(worker_id=self._context.worker_id, kind=self.kind.name, limits=limits)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if isinstance(error, RowRefused) and not ids:  # the row is one that admission has found by itself
                raise
            if besides is not None and isinstance(error, DatabaseUnavailable | LockTimeout):
                await self._context.unanswered(error)  # another transaction may lock a key's row
            else:
                self._context.health.failed(error)
            if ids and not seen:
                self._batches.limit = max(1, min(self._batches.limit, len(ids)) // 2)
            taken = Taken(await read_back(self._context, self.kind.name, ids, besides), {})
            self._put_off(set(ids).difference(row.id for row in taken.claimed))
        else:
            self._context.health.answered()
            self._slots.note_claim(boottime() - started)
            self._batches.limit = min(MOST_AT_ONCE, 2 * self._batches.limit)
        if taken.refused_rows:
            with self._context.health.noting():  # if this fails, the next refusal is noted
                await self._context.refused_rows.note("claim", taken.refused_rows.items())
            self._put_off(taken.refused_rows, _REFUSED_DELAY)
        if seen:
            report_taken_over(taken.claimed, seen, events=self._context.events)
            self._late.taken_back(job.id for job in taken.claimed)
        # The last sign of life in the row is at least as late as the start of the claim.
        now = boottime()
        # Admission may find a job whose earlier run has not ended here; that claim is released as an orphan.
        fresh = [row for row in taken.claimed if row.id not in self._in_flight.runs]
        return [self._adopt_row(row, started, now, quiet) for row in fresh]

    def _claim_again(self, job_id: UUID) -> None:
        """Claim a job with a locked row again, soon or with growing pauses; many leave room to others."""
        claiming = self._in_flight.claiming[job_id]
        claiming.times_locked += 1
        if claiming.times_locked <= _LOCKED_TRIES and self._waiting_for_locks < max(1, self.most() // 4):
            self._waiting_for_locks += 1
            self._locked.post(job_id)
        elif claiming.times_locked == _LOCKED_TRIES + 1 and not self._in_flight.is_awaiting_lock:
            self._in_flight.is_awaiting_lock = True
            self._awaited.post(job_id)
        else:
            num_delivered = max((each.num_delivered for each in claiming.deliveries), default=1)
            self._put_off([job_id], min(_LOCKED_LONGEST_DELAY, 2.0 ** min(num_delivered, 10)))

    def _adopt_row(self, row: ClaimedJob, started: float, now: float, quiet_seconds: float) -> Run:
        deliveries = self._let_go(row.id)
        delivery = None
        if deliveries:
            delivery, self.delivered_at = deliveries[0], now
        run = Run(row, self.kind, delivery, beaten_at=started, now=now)
        self._in_flight.add(run)
        if quiet_seconds:
            run.quiet_seconds = quiet_seconds
        for copy in deliveries[1:]:
            _answer_copy(copy, row.dispatch)
        if row.cancel_requested:
            run.signal(StopReason.CANCELLED)
        self._context.counts.claimed(self.kind.name, row.waited)
        if self._context.events.wants("job.claimed"):
            self._context.events.emit("job.claimed", **run.facts(), waited=row.waited)
        return run

    def _note_held(self, job_id: UUID, row: RefusedJob) -> None:
        facts = {"job_id": str(job_id), "kind": self.kind.name}
        self._context.events.emit("job.held", **facts, held_by=row.held_by, key=row.limit_key or "")
        if row.held_by != "limit":
            self._context.held.notify()

    def _answer_refused(self, delivery: Delivery, row: RefusedJob | None) -> None:
        if row is not None:
            delivery.ack()
            if row.held_by is None:
                facts = {"job_id": str(delivery.job_id), "kind": self.kind.name}
                self._context.events.emit("job.skipped", **facts, status=row.status, owner=row.worker_id)
        elif (datetime.now(UTC) - delivery.stored_at).total_seconds() < _NO_ROW_SECONDS:
            delivery.nak(_NO_ROW_DELAY)
        else:
            self.keep_unusable(delivery, "no job of this kind has this id")

    def _put_off(self, ids: Iterable[UUID], seconds: float = _DATABASE_DELAY) -> None:
        for job_id in self.undecided(ids):
            deliveries = self._let_go(job_id)
            if not deliveries:
                self.put_off.add(job_id)
            for delivery in deliveries:
                delivery.nak(jittered(seconds, _JITTER))

    def _note_kept(self) -> None:
        self._unusable -= 1
        self._context.room.notify()

    def _let_go(self, job_id: UUID) -> list[Delivery]:
        if (claim := self._in_flight.claiming.pop(job_id, None)) is None:
            return []
        if claim.is_surplus:
            claim.consumer.surplus -= 1
            self._in_flight.surplus -= 1
        else:
            claim.consumer.claiming -= 1
        return claim.deliveries


async def wake_held(context: WorkerContext, kind: str, keys: Collection[str]) -> None:
    """Queue held jobs of these keys that may begin now, and have them published."""
    wake = partial(admission.wake, context.database, refused_rows=context.refused_rows)
    try:
        jobs = await wake(worker_id=context.worker_id, kind=kind, keys=keys)
    except (DatabaseUnavailable, LockTimeout) as error:
        await context.unanswered(error)
        return
    if jobs:
        context.events.emit("jobs.woken", kind=kind, jobs=jobs)
        context.requeued.notify()


def _answer_copy(copy: Delivery, seen_at_dispatch: int) -> None:
    """Ack a copy up to the dispatch of the row; a copy of a later dispatch may be the job's only message."""
    if copy.dispatch <= seen_at_dispatch:
        copy.ack()
    else:
        _put_off(copy)


def _put_off(copy: Delivery) -> None:
    """Have a copy delivered again, each time later: forged ones would keep new messages from delivery."""
    doublings = min(copy.num_delivered - 1, _COPY_DELAY_DOUBLINGS)
    copy.nak(jittered(_ANOTHER_COPY_DELAY * 2.0**doublings, _JITTER))
