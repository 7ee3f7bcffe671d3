"""The whole machine: every rule, and the calm after the storm in which every job must end."""

import sys
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from jsworker.ownership.transitions.settle import Settled

from .claiming import Claiming, orphaned
from .lives import HOSTNAMES, Life
from .producing import Producing
from .recovering import Recovering
from .settling import Settling
from .stream import Message

_ENOUGH_ROUNDS = 4
"""Of the calm. One round brings every live job to its end; a second one finds nothing to do."""


class OwnershipMachine(Producing, Claiming, Settling, Recovering):
    """Two or three workers, a few jobs, an unreliable stream, impatient sweepers and a curious operator."""

    @initialize(
        workers=st.sampled_from([1, 1, 2, len(HOSTNAMES)]),
        jobs=st.sampled_from([1, 1, 2, 3]),
        marked=st.sampled_from(["at once", "late"]),
        most=st.sampled_from([None, 1, 2]),
        claimed=st.booleans(),
    )
    def begin(self, workers: int, jobs: int, marked: str, most: int | None, *, claimed: bool) -> None:
        """Begin with something to do; where few share few jobs, they meet most."""
        for hostname in HOSTNAMES[1:workers]:
            self.start(hostname)
        self.most_live = jobs
        for _ in range(jobs):
            self.enqueue_and_publish(unique_key="key-a", marked=marked, most=most)
        if claimed:
            self.deliver(life=self.alive[0], messages=list(self.messages.held), answer="comes")

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:  # an example that has failed or was given up has said all it has to say
            self._calm_down()
            self._everything_has_ended()

    def _calm_down(self) -> None:
        """Faults stop and everybody does what is to be done, until nothing moves."""
        self.in_flight.clear()
        self.unmarked.clear()
        for dead in self.dead:
            self._step(self.evidence, dead=dead, counted=False, culprit=False)
        for life in self.alive:
            self._clean_up(life)
        for _ in range(_ENOUGH_ROUNDS):
            if not any(job.live for job in self.model.all()):
                return
            self._round()

    def _clean_up(self, life: Life) -> None:
        if life.unclear:
            self._step(self.read_back, life=life)
        if life.in_hand:
            self._step(self.heartbeat, life=life, late=False)
        if life in orphaned(self):
            self._step(self.release_strays, life=life, long=True)
        if life.in_hand:
            self._step(self.end, runs=life.in_hand, how="complete", answered=True)

    def _round(self) -> None:
        if self.model.having("scheduled"):
            self._step(self.promote, due=True)
        if self.model.having("queued"):
            self._step(self.look_for_lost)
        if self.gone:
            self._step(self.republish, life=self.alive[0], gone=list(self.gone))
            self.gone.clear()
        if any(job.needs_publish for job in self.model.all()):
            self._step(self.publish, marked="at once", stored=True, again=True, within_window=False)
        for message in list(self.messages.held):
            if message in self.messages.held:
                self._process(self.alive[0], message)

    def _process(self, life: Life, message: Message) -> None:
        self._step(self.deliver, life=life, messages=[message], answer="comes")
        if life.in_hand:
            self._step(self.end, runs=life.in_hand, how="complete", answered=True)

    def _step(self, rule: object, **arguments: object) -> None:
        assert callable(rule)
        rule(**arguments)
        self.protocol_holds()

    def _everything_has_ended(self) -> None:
        live = [job for job in self.model.all() if job.live]
        assert not live, f"L1 {live} never ended"
        accepted = Counter(
            job_id for (job_id, _), (_, answer) in self.outcomes.items() if answer is Settled.COMPLETED
        )
        for job in self.model.all():
            completed = int(job.status == "completed")
            assert self.completions[job.id] == completed, (
                f"S2 {job} completed {self.completions[job.id]} times"
            )
            assert accepted[job.id] <= completed, f"S2 {accepted[job.id]} runs were accepted of {job}"
            self.world.saw(f"in the end: {job.status}")
