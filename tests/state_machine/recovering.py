"""Rules of whatever ends a run from outside: sweeps, evidence of death, operators; and lost messages."""

from typing import Literal
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.transitions import claim, republish, reset, workers
from jsworker.ownership.transitions.reset import TakenBack

from .example import Example, one_of, some_of, when
from .invariants import Right
from .lives import Life, Run
from .model import CRASHED, KIND, LIMITS, MISSED_HEARTBEATS, STALE, Gone, Job, Sighting
from .world import Row

_LONG = 600.0
_MOST_REMEMBERED = 4
"""Things that a sweeper has seen and not acted on yet."""


def _seen_so(sightings: list[Sighting], threshold: Literal["stale_after", "crash_after"]) -> Right:
    seen = {one.job.id: one.suspect for one in sightings}

    def right(row: Row) -> bool:
        suspect = seen.get(row["id"])
        return (
            suspect is not None
            and row["fencing_token"] == suspect.fencing_token
            and row["last_activity_at"] == suspect.last_activity_at
            and row[threshold] is not None
            and row["last_activity_at"] + row[threshold] < row["now"]
        )

    return right


def _suspects(seen: list[Sighting]) -> list[reset.Suspect]:
    return [one.suspect for one in seen]


def _running(machine: Example) -> list[Job]:
    return machine.model.having("processing")


def _running_and_another(machine: Example) -> list[Job]:
    running = _running(machine)
    return running + [job for job in machine.model.all() if job not in running][-1:]


_UNSUCCESSFUL = ("failed", "cancelled")


def _unsuccessful_and_another(machine: Example) -> list[Job]:
    return machine.model.having(*_UNSUCCESSFUL) + machine.model.having("completed", "queued")[:1]


def _marked(machine: Example) -> list[Job]:
    return [job for job in machine.model.having("queued") if not job.needs_publish]


def _unknown_to_be_gone(machine: Example) -> list[Job]:
    known = [one.job for one in machine.gone]
    return [job for job in _marked(machine) if job not in known and not machine.messages.naming(job.id)]


class Recovering(Example):
    """RESET by its four rules, the stale owner's claim, REPUBLISH, CANCEL and RETRY."""

    @when(_running)
    @rule(
        silent=some_of(_running),
        seconds=st.sampled_from([STALE, STALE, CRASHED]),
    )
    def fall_silent(self, silent: list[Job], seconds: float) -> None:
        """Owners miss their heartbeats, and a sweeper notes what it sees; it acts in a later step."""
        self.world.silence([job.id for job in silent], seconds)
        for job in silent:
            job.silence = seconds
            job.activity += 1
        looked = self.world.run(
            reset.look_for_late(self.world.database, heartbeat_interval=MISSED_HEARTBEATS / 2, limit=100)
        )
        said = {(one.id, one.fencing_token, one.stale, one.crashed) for one in looked.suspects}
        running = self.model.having("processing")
        assert said == {(job.id, job.token, job.stale, job.crashed) for job in running if job.late}
        assert looked.owners == len({job.worker_id for job in running})
        suspects = {one.id: one for one in looked.suspects}
        self.sightings += [
            Sighting(job, job.token, job.activity, suspects[job.id]) for job in self.model.in_order(suspects)
        ]
        del self.sightings[:-_MOST_REMEMBERED]
        self.world.saw("late: found", len(looked.suspects))

    @when(lambda machine: machine.sightings)
    @rule(
        life=one_of(lambda machine: machine.alive),
        seen=some_of(lambda machine: machine.sightings),
        crashed=st.booleans(),
        counted=st.sampled_from([True, True, False]),
    )
    def reset_seen(self, life: Life, seen: list[Sighting], *, crashed: bool, counted: bool) -> None:
        """A sweeper takes back what it has seen silent (rule 1) or found dead by two witnesses (rule 3)."""
        seen = list({one.job: one for one in seen}.values())
        rule_name = "crashed" if crashed else "stale"
        self.may_end(_seen_so(seen, "crash_after" if crashed else "stale_after"))
        reason = f"{rule_name} for {life}"
        due = [one.job for one in seen if one.unchanged and (one.job.crashed if crashed else one.job.stale)]
        database, late = self.world.database, _suspects(seen)
        taken = self.world.run(
            reset.reset_crashed(database, worker_id=life.id, crashed=late, reason=reason, counted=counted)
            if crashed
            else reset.reset_stale(database, worker_id=life.id, stale=late, reason=reason, counted=counted)
        )
        counts = {job: (counted or (crashed and job.cleared)) and job.may_have_begun for job in due}
        self._taken_back(f"reset {rule_name}", taken, counts, reason)
        self.world.saw(f"reset {rule_name}: owner was faster", len(seen) - len(due))

    def _taken_back(self, rule_name: str, taken: TakenBack, counted: dict[Job, bool], reason: str) -> None:
        owners = {job: job.worker_id for job in counted}
        for job, counts in counted.items():
            job.take_back(reason, counted=counts)
        self.world.stop_clock()
        assert not taken.refused
        said = {
            one.id: (one.status, one.fencing_token, one.dispatch, one.owner, one.counted, one.stalls)
            for one in taken.resets
        }
        assert said == {
            job.id: (job.status, job.token, job.dispatch, owners[job], counted[job], job.stalls)
            for job in counted
        }
        self.world.saw(f"{rule_name}: taken back", len(taken.resets))
        for one in taken.resets:
            self.world.saw(f"taken back: {one.status}")

    @when(lambda machine: machine.sightings)
    @rule(life=one_of(lambda machine: machine.alive), seen=some_of(lambda machine: machine.sightings))
    def claim_stale(self, life: Life, seen: list[Sighting]) -> None:
        """A worker takes a stale owner's job for itself, reset and claim in one."""
        wanted = [one for one in {one.job: one for one in seen}.values() if one.job.id not in life.busy_with]
        if not wanted:
            return
        self.may_end(_seen_so(wanted, "stale_after"))
        predicted = self.model.claim_stale(life.id, wanted)
        taken = self.world.run(
            claim.claim_stale(
                self.world.database, worker_id=life.id, kind=KIND, seen=_suspects(wanted), limits=LIMITS
            )
        )
        assert not taken.refused_rows
        assert {row.id: row.fencing_token for row in taken.claimed} == predicted
        self.adopt(life, taken.claimed, {})
        self.world.saw("claim stale: taken", len(predicted))
        self.world.saw("claim stale: refused", len(wanted) - len(predicted))

    @when(lambda machine: machine.working)
    @rule(life=one_of(lambda machine: machine.working))
    def crash(self, life: Life) -> None:
        """A worker process dies with its runs; a new one starts on the same host."""
        life.alive = False
        self.start(life.hostname)
        self.world.saw("crash")

    @when(lambda machine: machine.dead)
    @rule(dead=one_of(lambda machine: machine.dead), counted=st.booleans(), culprit=st.booleans())
    def evidence(self, dead: Life, *, counted: bool, culprit: bool) -> None:
        """The new life of a host finds earlier ones and takes back what they own (rule 2)."""
        database = self.world.database
        here = next(life for life in self.alive if life.hostname == dead.hostname)
        found = self.world.run(workers.earlier_lives(database, worker=here.registration()))
        assert {one.id: one.holds for one in found} == {
            life.id: len(self.model.owned_by(life.id)) for life in self.dead if life.hostname == here.hostname
        }
        owned = self.model.owned_by(dead.id)
        culprits = {job.id for job in owned[:1]} if culprit else set()
        self.may_end(lambda row: row["worker_id"] == dead.id)
        taken = self.world.run(
            reset.reset_dead(
                database,
                worker_id=here.id,
                owner=dead.id,
                reason="its process is gone",
                counted=counted,
                culprits=culprits,
            )
        )
        counts = {
            job: job.id in culprits and (counted or job.cleared)
            if culprits
            else counted and job.may_have_begun
            for job in owned
        }
        self._taken_back("reset dead", taken, counts, "its process is gone")
        self.world.run(workers.mark_stopped(database, worker_id=dead.id))
        dead.buried = True
        if not owned:
            self.world.saw("reset dead: nothing")

    @when(lambda machine: machine.runs)
    @rule(run=one_of(lambda machine: machine.runs))
    def clear_as_seen(self, run: Run) -> None:
        """An operator clears what a screen showed a while ago."""
        self.may_end(lambda row: (row["id"], row["fencing_token"]) == run.held)
        mine = self.model.mine(run.life.id, run.held)
        taken = self.world.run(
            reset.reset_by_operator(self.world.database, seen=[run.held], reason="as seen")
        )
        self._taken_back("clear", taken, {mine: False} if mine else {}, "as seen")
        if mine is None:
            self.world.saw("clear: owner was faster")

    @when(_running)
    @rule(job=one_of(_running_and_another))
    def clear(self, job: Job) -> None:
        """An operator clears a job, whatever it is doing."""
        running = job.status == "processing"
        self.may_end(lambda row: running and row["id"] == job.id)
        try:
            taken = self.world.run(self.world.client.clear_and_reenqueue(job.id, "by hand"))
        except TransitionRefused:
            assert not running
            self.world.saw("clear: not running")
            return
        assert running
        self._taken_back("clear", TakenBack([taken], {}), {job: False}, "by hand")

    @when(lambda machine: [job for job in _running(machine) if not job.cancel_requested])
    @rule(jobs=some_of(_running_and_another, most=2))
    def cancel(self, jobs: list[Job]) -> None:
        unknown = UUID(int=0)
        said = self.world.run(self.world.client.cancel(unknown, *(job.id for job in jobs)))
        running = {job.id for job in jobs if job.status == "processing"}
        final = {job.id: job.status for job in jobs if not job.live}
        for job in jobs:
            if job.status == "processing":
                job.cancel_requested = True
                self.world.saw("cancel: requested")
            elif job.live:
                self.world.saw(f"cancel: was {job.status}")
                job.enter("cancelled")
            else:
                self.world.saw("cancel: final")
        self.model.advance(job.batch for job in jobs if job.status == "cancelled" and job.id not in final)
        assert set(said.requested) == running
        assert set(said.cancelled) == {job.id for job in jobs} - running - final.keys()
        assert (said.final, said.unknown) == (final, [unknown])

    @when(lambda machine: machine.model.having(*_UNSUCCESSFUL))
    @rule(job=one_of(_unsuccessful_and_another))
    def retry(self, job: Job) -> None:
        self.is_retried(job)
        status = job.status
        taken = self.model.retry(job)
        try:
            self.world.run(self.world.client.retry(job.id))
        except TransitionRefused:
            assert not taken
            self.world.saw(f"retry: {'unique key taken' if status in _UNSUCCESSFUL else 'not to be retried'}")
            return
        assert taken
        self.world.saw(f"retry: was {status}")

    @when(_unknown_to_be_gone)
    @rule()
    def look_for_lost(self) -> None:
        """A sweeper asks the stream for the messages of jobs that have waited long."""
        self.world.age_queue(2 * _LONG)
        for job in self.model.having("queued"):
            job.queued_long = True
        posted = self.world.run(
            republish.posted(self.world.database, after=None, older_than=_LONG, limit=100)
        )
        assert {(one.id, one.dispatch) for one in posted} == {(job.id, job.dispatch) for job in _marked(self)}
        gone = [
            Gone(job, job.dispatch)
            for job in self.model.in_order(one.id for one in posted)
            if not self.messages.naming(job.id, job.dispatch)
        ]
        self.gone = (self.gone + gone)[-_MOST_REMEMBERED:]
        self.world.saw("lost messages: found" if gone else "lost messages: none")

    @when(lambda machine: machine.gone)
    @rule(life=one_of(lambda machine: machine.alive), gone=some_of(lambda machine: machine.gone))
    def republish(self, life: Life, gone: list[Gone]) -> None:
        lost = [(one.job.id, one.dispatch) for one in gone]
        predicted = self.model.republish(lost)
        again = self.world.run(republish.republish(self.world.database, worker_id=life.id, gone=lost))
        assert set(again) == predicted
        self.world.saw("republish: taken", len(predicted))
        self.world.saw("republish: has moved on", len(gone) - len(predicted))
