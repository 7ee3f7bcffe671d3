"""Rules of admission, workflows and schedules: HOLD, ADMIT, WAKE, FINISH, NEEDS, FIRE."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from jsworker.core.errors import OwnershipLost
from jsworker.core.schedule_rules import Every
from jsworker.ownership.transitions import (
    admission,
    claim,
    enqueue,
    limits,
    schedules,
    workflow_control,
    workflows,
)
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.limits import Numbers
from jsworker.ownership.transitions.schedules import NewSchedule, StoredSchedule
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow

from .claiming import Claiming, orphaned
from .example import one_of, some_of, when
from .invariants import ADMISSION, flow_violations
from .lives import HOSTNAMES, Life, Run
from .model import KIND, LIMITS, Advance, Batch, Job
from .producing import Producing
from .recovering import Recovering
from .settling import Settling
from .world import Rows

_MOST_LIVE = 6
_SCHEDULE = "every-hour"
_HOUR = timedelta(hours=1)
_ENOUGH_ROUNDS = 30


@dataclass
class Key:
    """What limits the jobs of a key; its kind's maximum where it has none."""

    most: int | None
    tokens: int | None = None


@dataclass(frozen=True)
class Look:
    """A schedule as a worker has read it."""

    stored: StoredSchedule
    fired: int
    revision: int

    def __repr__(self) -> str:
        return f"instant {self.fired} at revision {self.revision}"


def _few(machine: "FlowMachine") -> bool:
    return sum(job.live for job in machine.model.all()) < _MOST_LIVE


def _members(machine: "FlowMachine") -> list[Run]:
    return [run for run in machine.runs if run.job.batch is not None and run.job.live]


def _waiting(machine: "FlowMachine") -> list[Job]:
    return [job for job in machine.model.having("queued", "scheduled") if job.held_by != "needs"]


def _has_not_looked(machine: "FlowMachine") -> bool:
    now = (machine.fired, machine.revision)
    return not machine.looks or (machine.looks[-1].fired, machine.looks[-1].revision) != now


def _members_in_hand(machine: "FlowMachine") -> list[Run]:
    return [run for life in machine.alive for run in life.in_hand if run.job.batch is not None]


def _failed(machine: "FlowMachine") -> list[Job]:
    """Return failed jobs; where there are any, those for which others were cancelled."""
    failed = machine.model.having("failed")
    waited_for = [job for job in failed if any(one.is_cancelled_for_needs for one in machine.model.all())]
    return [job for job in waited_for if job.batch is not None] or failed


_answers = st.sampled_from(["comes", "comes", "comes", "is lost"])
_keys = st.sampled_from([None, "a", "a", "b", "b"])


class FlowMachine(Settling, Recovering):
    """Two workers, a kind with a limit and two keys, small workflows, and a schedule that is always due."""

    promote = Producing.promote
    heartbeat = Claiming.heartbeat
    release_strays = Claiming.release_strays

    @initialize(
        workers=st.sampled_from([1, 2]),
        keys=st.lists(_keys, min_size=1, max_size=4),
        flow=st.booleans(),
        on_failure=st.sampled_from(["cancel", "cancel", "run"]),
    )
    def begin(self, workers: int, keys: list[str | None], on_failure: str, *, flow: bool) -> None:
        """Begin with a kind of which two run at once, of key ``a`` one; of ``b`` two begin in two hours."""
        self.keys = {"": Key(2), "a": Key(1), "b": Key(None, tokens=2)}
        self.looks: list[Look] = []
        self.fired, self.revision = 0, 1
        self._flow_rows: tuple[Rows, Rows] = {}, {}
        numbers = {"": Numbers(2), "a": Numbers(1), "b": Numbers(None, 2, 7200.0)}
        for key, number in numbers.items():
            self.world.run(limits.set_numbers(self.world.database, KIND, key, number))
        self._write_schedule(replace=False)
        for hostname in HOSTNAMES[1:workers]:
            self.start(hostname)
        if flow:
            self.enqueue_flow(members=1, key=None, on_failure=on_failure)
            self.admit(life=self.alive[0], asked=self.model.having("queued"), answer="comes")
        for each in keys:
            self.enqueue(key=each)

    # -- admission, as it should be

    def _running(self, key: str) -> int:
        return sum(job.key == key for job in self.model.having("processing"))

    def _most(self, key: str) -> int:
        most = self.keys[key].most or self.keys[""].most
        assert most is not None
        return most

    def _state(self, key: str) -> tuple[int, str]:
        """Return how many jobs of a key may begin, and what holds the others."""
        if self.model.paused & {key, ""}:
            return 0, "paused"
        slots, tokens = self._most(key) - self._running(key), self.keys[key].tokens
        if tokens is None:
            return max(0, slots), "limit"
        return max(0, min(slots, tokens)), "limit" if slots <= tokens else "rate"

    def _in_turn(self, jobs: Iterable[Job]) -> list[Job]:
        rows = self._rows
        return sorted(jobs, key=lambda job: (rows[job.id]["priority"], rows[job.id]["queued_at"], job.id))

    def _held(self, key: str) -> list[Job]:
        return self._in_turn(job for job in self.model.all() if job.held_by in ADMISSION and job.key == key)

    def _admit(
        self, life: Life, asked: Sequence[Job], keys: Iterable[str], most: int, besides: Iterable[UUID]
    ) -> dict[UUID, int]:
        """Change the model as ADMIT has to change the rows, and return the tokens of what it gives."""
        fitting: list[Job] = []
        for key in {*keys, *(job.key for job in asked)}:
            free, why = self._state(key)
            held = [job for job in self._held(key) if job.id not in besides][: min(free, most)]
            ranked = self._in_turn([*held, *(job for job in asked if job.key == key)])
            fitting += ranked[:free]
            for job in (job for job in ranked[free:] if job in asked):
                job.limit_key = key
                job.hold(why)
                self.world.saw(f"held by: {why}")
                self.world.saw("admit: held")
        taken = self._in_turn(fitting)[:most]
        for job in taken:
            tokens = self.keys[job.key].tokens
            if tokens is not None:
                self.keys[job.key].tokens = tokens - 1
            self.world.saw("admit: held row taken", job.held_by is not None)
            job.limit_key = job.key
            job.own(life.id)
        return {job.id: job.token for job in taken}

    # -- rules of admission

    @when(_few)
    @rule(key=_keys)
    def enqueue(self, key: str | None) -> None:
        job_id = new_job_id()
        new = NewJob(job_id, "{}", limit_key=key)
        assert self.world.run(enqueue.enqueue(self.world.database, KIND, new, publish_after=0.0)).created
        self._added(job_id, key, None)
        self._rows = self.world.rows()

    @when(lambda machine: machine.model.having("queued"))
    @rule(
        life=one_of(lambda machine: machine.alive),
        asked=some_of(lambda machine: machine.model.having("queued")),
        answer=_answers,
    )
    def admit(self, life: Life, asked: list[Job], answer: str) -> None:
        """Messages reach a worker: what fits begins, the rest is held; what was held before comes first."""
        asked = [job for job in asked if job.id not in life.busy_with]
        if not asked:
            return
        besides = life.busy_with
        predicted = self._admit(life, asked, (), len(asked), besides)
        call = admission.admit(
            self.world.database,
            worker_id=life.id,
            kind=KIND,
            limits=LIMITS,
            ids=[job.id for job in asked],
            besides=besides,
        )
        self._answered(life, self.world.run(call), predicted, answer)
        self.world.saw("admit: queued row left", any(job.status == "queued" for job in asked))
        self.world.saw("admit: taken" if predicted else "admit: nothing")

    @when(lambda machine: any(job.held_by in ADMISSION for job in machine.model.all()))
    @rule(
        life=one_of(lambda machine: machine.alive),
        keys=st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3, unique=True),
        most=st.sampled_from([1, 1, 2, 5]),
        answer=_answers,
    )
    def free(self, life: Life, keys: list[str], most: int, answer: str) -> None:
        """A worker that has freed a slot takes what is held itself."""
        besides = life.busy_with
        predicted = self._admit(life, (), keys, most, besides)
        call = admission.admit(
            self.world.database,
            worker_id=life.id,
            kind=KIND,
            limits=LIMITS,
            keys=keys,
            most=most,
            besides=besides,
        )
        self._answered(life, self.world.run(call), predicted, answer)
        self.world.saw("free: taken" if predicted else "free: nothing")

    def _answered(self, life: Life, taken: claim.Taken, predicted: dict[UUID, int], answer: str) -> None:
        assert not taken.refused_rows
        assert {row.id: row.fencing_token for row in taken.claimed} == predicted
        assert {row.limit_key for row in taken.claimed} == {
            self.model.jobs[job_id].key for job_id in predicted
        }
        if answer == "comes":
            self.adopt(life, taken.claimed, {})
        else:
            self.world.saw("admit: answer lost")

    @when(orphaned)
    @rule(life=one_of(orphaned))
    def read_back(self, life: Life) -> None:
        """After an answer that was lost, whatever admission gave and nobody runs is taken up."""
        hand = {run.job.id for run in life.in_hand}
        owned = {job.id: job.token for job in self.model.owned_by(life.id) if job.id not in hand}
        found = self.world.run(
            claim.read_back_admitted(self.world.database, worker_id=life.id, kind=KIND, besides=hand)
        )
        assert {row.id: row.fencing_token for row in found} == owned
        self.adopt(life, found, {})
        self.world.saw("read back: mine", len(owned))

    @when(lambda machine: any(job.held_by in ADMISSION for job in machine.model.all()))
    @rule(keys=st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3, unique=True))
    def wake(self, keys: list[str]) -> None:
        predicted = 0
        for key in keys:
            for job in self._held(key)[: self._state(key)[0]]:
                job.enter("queued")
                predicted += 1
        call = admission.wake(self.world.database, worker_id=None, kind=KIND, keys=keys)
        assert self.world.run(call) == predicted
        self.world.saw("wake: woken" if predicted else "wake: nothing")

    @when(_waiting)
    @rule(key=st.sampled_from(["", "a", "b"]))
    def pause(self, key: str) -> None:
        """An operator pauses a key or the kind, or lets it go on."""
        database = self.world.database
        if key in self.model.paused:
            self.world.run(limits.resume(database, KIND, key))
        else:
            call = limits.pause(database, KIND, key, seconds=None, paused_by="operator", reason=None)
            self.world.run(call)
        self.model.paused ^= {key}

    @when(_waiting)
    @rule(most=st.sampled_from([1, 2, 3]))
    def set_limit(self, most: int) -> None:
        """An operator sets another limit of key ``a``; what runs goes on."""
        before = self._most("a")
        self.world.run(limits.set_numbers(self.world.database, KIND, "a", Numbers(most)))
        self.keys["a"].most = most
        self.world.saw("limit: lowered", most < before)
        self.world.saw("limit: raised", most > before)

    @when(lambda machine: machine.keys["b"].tokens == 0)
    @rule()
    def return_tokens(self) -> None:
        self.world.return_tokens()
        self.keys["b"].tokens = 2

    # -- rules of workflows

    @when(lambda machine: _few(machine) and len(machine.model.batches) < _MOST_LIVE)
    @rule(members=st.sampled_from([1, 2]), key=_keys, on_failure=st.sampled_from(["cancel", "cancel", "run"]))
    def enqueue_flow(self, members: int, key: str | None, on_failure: str) -> None:
        """Enqueue a workflow of three batches, the second after the first, the third after both."""
        nodes: list[Batch] = []
        batches: list[NewBatch] = []
        for place, count in enumerate((members, 1, 1)):
            name = f"batch{len(self.model.batches) + place}"
            batch = Batch(name, new_job_id(), nodes[:place], on_failure if place else "cancel")
            jobs = [NewJob(new_job_id(), "{}", limit_key=key) for _ in range(count)]
            needs = [need.id for need in batch.needs]
            batches.append(NewBatch(batch.id, name, KIND, batch.on_failure, needs, jobs))
            nodes.append(batch)
        workflow = new_job_id()
        self.world.run(enqueue_workflow(self.world.database, workflow=workflow, name="flow", batches=batches))
        self.model.batches += nodes
        for batch, new in zip(nodes, batches, strict=True):
            for each in new.jobs:
                job = self._added(each.id, key, batch)
                if batch.needs:
                    job.dispatch = 0
                    job.hold("needs")
        self._rows = self.world.rows()

    def _added(self, job_id: UUID, key: str | None, batch: Batch | None) -> Job:
        job = self.model.add(job_id, unique_key=None, delayed=False, attempts=None, stalls=None)
        job.limit_key, job.batch = key, batch
        return job

    @when(_members)
    @rule(run=one_of(_members))
    def add_member(self, run: Run) -> None:
        """A run adds a member to its batch, of which another run may own its job by then."""
        job_id = new_job_id()
        mine = self.model.mine(run.life.id, run.held)
        call = workflow_control.add_members(
            self.world.database,
            worker_id=run.life.id,
            held=(run.job.id, run.token),
            kind=KIND,
            new=[NewJob(job_id, "{}")],
        )
        try:
            self.world.run(call)
        except OwnershipLost:
            assert mine is None, f"{run} owns its job and may add to its batch"
            self.world.saw("add member: rejected")
            return
        assert mine is not None, f"{run} does not own its job and has added to its batch"
        assert mine.batch is not None
        mine.batch.generation += 1
        self._added(job_id, None, mine.batch)
        self.world.saw("add member: added")

    @when(lambda machine: machine.model.batches)
    @rule(batches=some_of(lambda machine: machine.model.batches))
    def look_after(self, batches: list[Batch]) -> None:
        """A worker that has settled members looks after their batches."""
        self._compare(self.model.advance(batches), self._advance([batch.id for batch in batches]))

    @when(lambda machine: machine.model.batches)
    @rule()
    def sweep(self) -> None:
        """A scan looks after whatever nobody came back to."""
        left = self.world.run(workflows.left_undone(self.world.database))
        undone = [
            batch
            for batch in self.model.batches
            if not batch.outcome and not any(job.live for job in self.model.members(batch))
        ]
        needs = [batch for batch in self.model.batches if batch.outcome and not batch.propagated]
        assert set(left.batches) == {batch.id for batch in undone}
        assert left.needs == {batch.id: batch.generation for batch in needs}
        call = workflows.advance(
            self.world.database, left.batches, needs=left.needs, workflows=left.workflows
        )
        self._compare(self.model.advance(undone, needs=needs), self.world.run(call))

    def _advance(self, ids: list[UUID]) -> workflows.Advanced:
        return self.world.run(workflows.advance(self.world.database, ids))

    def _compare(self, predicted: Advance, said: workflows.Advanced) -> None:
        assert not said.refused
        assert {batch.id for batch in said.batches} == set(predicted.finished)
        assert (said.woken, said.cancelled) == (predicted.woken, predicted.cancelled)
        self.world.saw("batches: finished" if predicted.finished else "batches: not finished")
        self.world.saw("batches: woken", predicted.woken)
        self.world.saw("batches: cancelled", predicted.cancelled)

    @when(_members_in_hand)
    @rule(run=one_of(_members_in_hand))
    def fail_member(self, run: Run) -> None:
        """A member fails for good, and its worker looks after its batch."""
        batch = run.job.batch
        assert batch is not None
        self._settle([run], "fail for good", answered=True)
        self.look_after([batch])

    @when(_failed)
    @rule(job=one_of(_failed))
    def retry(self, job: Job) -> None:
        """An operator retries a job: a member's batch is opened, what was cancelled for it is held again."""
        cancelled = sum(one.is_cancelled_for_needs for one in self.model.all())
        self.is_retried(job)
        assert self.model.retry(job)
        self.world.run(self.world.client.retry(job.id))
        self.world.saw("retry: taken")
        self.world.saw("retry of a member: opened", job.batch is not None)
        left = sum(one.is_cancelled_for_needs for one in self.model.all())
        self.world.saw("retry of a member: held again", cancelled - left)

    # -- rules of schedules

    def _write_schedule(self, *, replace: bool) -> None:
        database = self.world.database
        first = self.world.run(schedules.database_now(database)) - 10_000 * _HOUR
        new = NewSchedule(_SCHEDULE, KIND, "{}", Every(hours=1), first)
        self.world.run(schedules.add(database, new, replace=replace))

    @when(_has_not_looked)
    @rule()
    def look_at_schedule(self) -> None:
        """A worker reads what is due, and acts in a later step."""
        [stored] = self.world.run(schedules.upcoming(self.world.database))
        assert stored.revision == self.revision
        self.looks = [*self.looks[-3:], Look(stored, self.fired, self.revision)]

    @when(lambda machine: machine.looks and _few(machine))
    @rule(look=one_of(lambda machine: machine.looks))
    def fire(self, look: Look) -> None:
        """A worker fires what it has read, which another may have fired since, or an operator changed."""
        due = look.stored.next_at
        call = schedules.fire(self.world.database, look.stored, seen=due, instant=due, then=due + _HOUR)
        fired = self.world.run(call)
        if (look.fired, look.revision) != (self.fired, self.revision):
            assert fired is None, (
                f"{look} was fired, although {self.fired} at revision {self.revision} is due"
            )
            self.world.saw("fire: too late")
            return
        assert fired is not None
        assert fired.job_id is not None
        self.fired += 1
        self._added(fired.job_id, None, None)
        self.world.saw("fire: fired")

    @when(lambda machine: machine.looks and machine.looks[-1].revision == machine.revision)
    @rule()
    def change_rule(self) -> None:
        """An operator writes the schedule anew."""
        self._write_schedule(replace=True)
        self.revision += 1

    # -- what holds after every step

    @invariant()
    def flow_holds(self) -> None:
        before, after = self._flow_rows, (self.world.rows(), self.world.batches())
        most = {key: self._most(key) for key in self.keys}
        found = list(flow_violations(before[0], after[0], (before[1], after[1]), most))
        assert not found, "; ".join(found)
        self._flow_rows = after
        for batch in self.model.batches:
            row = after[1][batch.id]
            differences = [
                f"{column} {row[column]!r}, not {value!r}"
                for column, value in batch.columns().items()
                if row[column] != value
            ]
            assert not differences, f"{batch}: " + ", ".join(differences)
        self._every_held_job_is_found()

    def _every_held_job_is_found(self) -> None:
        """L6: a sweep finds each key of which jobs are held, and how many of them may begin."""
        held = {job.key for job in self.model.all() if job.held_by in ADMISSION}
        found = self.world.run(admission.waiting_keys(self.world.database))
        assert {one.key: one.jobs for one in found} == {key: self._state(key)[0] for key in held}

    # -- the calm after the storm

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self._calm_down()
            live = [job for job in self.model.all() if job.live]
            assert not live, f"L1 {live} never ended"
            left = [batch for batch in self.model.batches if not (batch.outcome and batch.propagated)]
            assert not left, f"A3 {left} never finished"
            for job in self.model.all():
                self.world.saw(f"in the end: {job.status}")

    def _calm_down(self) -> None:
        for dead in self.dead:
            self._step(self.evidence, dead=dead, counted=False, culprit=False)
        for key in sorted(self.model.paused):
            self._step(self.pause, key=key)
        for life in self.alive:
            if life in orphaned(self):
                self._step(self.read_back, life=life)
            if life.in_hand:
                self._step(self.heartbeat, life=life, late=False)
            self._complete(life)
        for _ in range(_ENOUGH_ROUNDS):
            if self.model.batches:
                self._step(self.sweep)
            if not any(job.live for job in self.model.all()):
                return
            self._round(self.alive[0])

    def _round(self, life: Life) -> None:
        if self.keys["b"].tokens == 0:
            self._step(self.return_tokens)
        if self.model.having("scheduled"):
            self._step(self.promote, due=True)
            self._step(self.wake, keys=list(self.keys))
        if queued := self.model.having("queued"):
            self._step(self.admit, life=life, asked=queued, answer="comes")
        self._complete(life)

    def _complete(self, life: Life) -> None:
        if life.in_hand:
            self._step(self.end, runs=life.in_hand, how="complete", answered=True)

    def _step(self, rule: object, **arguments: object) -> None:
        assert callable(rule)
        rule(**arguments)
        self.protocol_holds()
        self.flow_holds()
