"""Rules of a worker that takes jobs and keeps them: CLAIM and its answers, HEARTBEAT, writes of a run."""

from collections.abc import Coroutine
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.transitions import claim, heartbeat, republish, settle, steps
from jsworker.ownership.transitions.claim import Taken
from jsworker.ownership.transitions.settle import Return, Settled

from .example import Example, one_of, some_of, when
from .lives import ClaimInFlight, Life, Run
from .model import KIND, LIMITS
from .stream import Message

_LONG = 600.0
"""Seconds that the workers of the tests wait before they look for what may have been forgotten."""


_PATIENCE = {
    "patience": (LIMITS.stale_after, LIMITS.crash_after),
    "no crash threshold": (9000.0, None),
    "never stale": (None, 1500.0),
}


def _owners(machine: Example) -> list[Life]:
    return [life for life in machine.alive if machine.model.owned_by(life.id)]


def orphaned(machine: Example) -> list[Life]:
    return [
        life
        for life in machine.alive
        if {job.id for job in machine.model.owned_by(life.id)} - {run.job.id for run in life.in_hand}
    ]


class Claiming(Example):
    """A worker's deliveries, claims, heartbeats and writes during a run."""

    @when(lambda machine: machine.messages.held)
    @rule(
        life=one_of(lambda machine: machine.alive),
        messages=some_of(lambda machine: machine.messages.held),
        answer=st.sampled_from(["comes", "comes", "comes", "is lost", "is late", "is never sent"]),
    )
    def deliver(self, life: Life, messages: list[Message], answer: str) -> None:
        """Messages reach a worker, which claims their jobs in one statement."""
        kind = messages[0].kind
        wanted: dict[UUID, Message] = {}
        for message in messages:
            if message.kind == kind and self._is_new(life, message):
                wanted.setdefault(message.job_id, message)
        if not wanted:
            return
        if answer == "comes":
            self._claim(life, kind, wanted)
            return
        life.unclear |= wanted.keys()
        names = ", ".join(message.name for message in wanted.values())
        sent = ClaimInFlight(life, kind, list(wanted), names)
        if answer == "is lost":
            self._arrive(sent)
        elif answer == "is late":
            self.in_flight.append(sent)
        self.world.saw(f"claim: answer {answer}")

    def _is_new(self, life: Life, message: Message) -> bool:
        if message.job_id in life.unclear:
            return False
        run = life.running(message.job_id)
        if run is None:
            return True
        if message.dispatch <= run.dispatch:
            self.messages.remove(message)
            self.world.saw("deliver: spent copy of a run in hand")
        else:
            self.world.saw("deliver: newer copy of a run in hand")
        return False

    def _claim(self, life: Life, kind: str, wanted: dict[UUID, Message]) -> None:
        database = self.world.database
        predicted = self.model.claim(life.id, kind, wanted)
        taken = self.world.run(
            claim.claim(database, worker_id=life.id, kind=kind, ids=list(wanted), limits=LIMITS)
        )
        self._begin(life, taken, predicted, wanted)
        refused = wanted.keys() - predicted.keys()
        why = self.world.run(claim.look_at_refused(database, kind=kind, ids=refused, worker_id=life.id))
        jobs = [self.model.jobs[job_id] for job_id in refused if job_id in self.model.jobs and kind == KIND]
        said = {job_id: (one.status, one.dispatch, one.worker_id) for job_id, one in why.items()}
        assert said == {job.id: (job.status, job.dispatch, job.worker_id) for job in jobs}
        for job_id in refused:
            self.messages.remove(wanted[job_id])
        self.world.saw("claim: taken", len(predicted))
        self.world.saw("claim: no such job", len(refused) - len(jobs))
        for job in jobs:
            self.world.saw(f"claim: refused, {'live' if job.live else 'final'}")

    def _begin(
        self, life: Life, taken: Taken, predicted: dict[UUID, int], messages: dict[UUID, Message]
    ) -> None:
        assert not taken.refused_rows
        assert {row.id: row.fencing_token for row in taken.claimed} == predicted
        self.adopt(life, taken.claimed, messages)

    @when(lambda machine: machine.in_flight)
    @rule(sent=one_of(lambda machine: machine.in_flight))
    def claim_arrives(self, sent: ClaimInFlight) -> None:
        """A CLAIM commits whose answer is awaited no more."""
        self.in_flight.remove(sent)
        self._arrive(sent)
        self.world.saw("claim in flight: owner alive" if sent.life.alive else "claim in flight: owner dead")

    def _arrive(self, sent: ClaimInFlight) -> None:
        self.model.claim(sent.life.id, sent.kind, sent.ids)
        call = claim.claim(
            self.world.database, worker_id=sent.life.id, kind=sent.kind, ids=sent.ids, limits=LIMITS
        )
        self.world.run(call)

    @when(lambda machine: [life for life in machine.alive if life.unclear])
    @rule(life=one_of(lambda machine: [life for life in machine.alive if life.unclear]))
    def read_back(self, life: Life) -> None:
        """What is mine now was claimed by the claim whose answer never came."""
        owned = {job.id: job.token for job in self.model.owned_by(life.id) if job.id in life.unclear}
        found = self.world.run(claim.read_back(self.world.database, worker_id=life.id, ids=life.unclear))
        assert {row.id: row.fencing_token for row in found} == owned
        life.unclear.clear()
        self.adopt(life, found, {})
        self.world.saw("read back: mine" if owned else "read back: nothing")

    @when(lambda machine: machine.model.having("queued"))
    @rule(life=one_of(lambda machine: machine.alive), long=st.sampled_from([True, True, False]))
    def idle_poll(self, life: Life, *, long: bool) -> None:
        """A worker without messages looks into the table for what has waited long."""
        if long:
            self.world.age_queue(2 * _LONG)
            for job in self.model.having("queued"):
                job.queued_long = True
        besides = life.busy_with
        predicted = {
            job.id for job in self.model.having("queued") if job.queued_long and job.id not in besides
        }
        found = self.world.run(
            republish.waiting(self.world.database, kind=KIND, older_than=_LONG, limit=100, besides=besides)
        )
        assert set(found) == predicted
        tokens = self.model.claim(life.id, KIND, predicted)
        assert tokens.keys() == predicted
        taken = self.world.run(
            claim.claim(self.world.database, worker_id=life.id, kind=KIND, ids=found, limits=LIMITS)
        )
        self._begin(life, taken, tokens, {})
        self.world.saw("idle poll: taken" if predicted else "idle poll: nothing")

    @when(lambda machine: machine.working)
    @rule(life=one_of(lambda machine: machine.working), late=st.booleans())
    def heartbeat(self, life: Life, *, late: bool) -> None:
        """A worker renews its runs; ``late``: those that have ended since the statement was made."""
        hand = [run.held for run in life.runs if not run.in_hand] if late else life.hand
        predicted = self.model.heartbeat(life.id, hand)
        beat = self.world.run(heartbeat.heartbeat(self.world.database, worker_id=life.id, in_flight=hand))
        assert beat._replace(activities={}) == predicted
        for run in life.in_hand:
            if run.held in beat.lost | beat.completed:
                run.in_hand = False
                self.messages.remove(run.message)
        for answer in ("alive", "cancelled", "lost", "completed"):
            self.world.saw(f"heartbeat: {answer}", len(getattr(beat, answer)))

    @when(lambda machine: machine.runs)
    @rule(
        run=one_of(lambda machine: machine.superseded or machine.runs),
        what=st.sampled_from(
            [
                "stage",
                "progress",
                "checkpoint",
                "step",
                "step",
                "patience",
                "no crash threshold",
                "never stale",
            ]
        ),
    )
    def write(self, run: Run, what: str) -> None:
        """A run writes into its row, which another run may own by then."""
        if what in _PATIENCE:
            self._set_patience(run, *_PATIENCE[what])
        elif what == "checkpoint":
            self._save_checkpoint(run, str(run.token))
        elif what == "step":
            self._keep_step(run, str(run.token))
        else:
            self._update_progress(run, 0.5 if what == "progress" else None)

    def _update_progress(self, run: Run, progress: float | None) -> None:
        call = heartbeat.update_progress(
            self.world.database,
            worker_id=run.life.id,
            held=run.held,
            stage="walking",
            progress=progress,
            message=None,
        )
        if self._owner_writes(run, call) and progress is not None:
            run.job.progress = progress

    def _save_checkpoint(self, run: Run, checkpoint: str) -> None:
        call = heartbeat.save_checkpoint(
            self.world.database, worker_id=run.life.id, held=run.held, checkpoint=checkpoint
        )
        if self._owner_writes(run, call):
            run.job.checkpoint = checkpoint

    def _keep_step(self, run: Run, result: str) -> None:
        call = steps.keep_step(
            self.world.database, worker_id=run.life.id, held=run.held, name="step", result=result
        )
        is_new: list[bool] = []

        async def keep() -> None:
            is_new.append(await call)

        if self._owner_writes(run, keep()):
            assert is_new == [run.job.step is None], "the first result of a step stays"
            self.world.saw("step: kept" if is_new[0] else "step: kept before")
            run.job.step = run.job.step or result

    def _set_patience(self, run: Run, stale_after: float | None, crash_after: float | None) -> None:
        call = heartbeat.set_thresholds(
            self.world.database,
            worker_id=run.life.id,
            held=run.held,
            stale_after=stale_after,
            crash_after=crash_after,
        )
        if self._owner_writes(run, call):
            run.job.stale_after, run.job.crash_after = stale_after, crash_after

    def _owner_writes(self, run: Run, call: Coroutine[Any, Any, object]) -> bool:
        job = self.model.mine(run.life.id, run.held)
        try:
            self.world.run(call)
        except OwnershipLost:
            assert job is None, f"{run} owns its job and got the answer that it does not"
            self.world.saw("owner's write: rejected")
            return False
        assert job is not None, f"{run} does not own its job and was allowed to write"
        job.show_life()
        job.has_written = True
        self.world.saw("owner's write: taken")
        return True

    @when(_owners)
    @rule(life=one_of(_owners), long=st.sampled_from([True, True, False]))
    def release_strays(self, life: Life, *, long: bool) -> None:
        """A worker gives back what it owns and does not run."""
        if long:
            self.world.age_claims(life.id, 2 * _LONG)
            for job in self.model.owned_by(life.id):
                job.claimed_long = True
        predicted = {
            (job.id, job.token)
            for job in self.model.owned_by(life.id)
            if job.claimed_long and job.id not in life.unclear and (job.id, job.token) not in life.hand
        }
        found = self.world.run(
            heartbeat.orphaned_claims(
                self.world.database,
                worker_id=life.id,
                in_flight=life.hand,
                claiming=life.unclear,
                older_than=_LONG,
            )
        )
        assert set(found) == predicted
        self.world.saw("orphaned claims: found" if found else "orphaned claims: none")
        if not found:
            return
        returns = [Return(job_id, token, "orphaned claim") for job_id, token in found]
        self.owner_may_end(life, dict(found.keys()))
        answers = self.model.release(life.id, returns)
        said = self.world.run(settle.release(self.world.database, worker_id=life.id, runs=returns))
        assert said == answers
        assert Settled.LOST not in said
