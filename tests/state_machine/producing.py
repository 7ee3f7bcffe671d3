"""Rules of producers, of the relay, and of a stream that loses, repeats and forges messages."""

from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule

from jsworker.ownership.transitions import enqueue, publish
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.publish import Sent

from .example import Example, one_of, some_of, when
from .model import KIND, OTHER_KIND, Job
from .stream import Message

MOST_MESSAGES = 5

_limits = st.sampled_from([None, None, 1, 2, 3])
_unique_keys = st.sampled_from([None, "key-a"])


def _few(machine: Example) -> bool:
    return sum(job.live for job in machine.model.all()) < machine.most_live


def _places(machine: Example) -> list[int]:
    """Return where in the list of late answers one is for an older dispatch, else all places."""
    everywhere = list(range(len(machine.unmarked)))
    sent = [(machine.model.jobs[one.id], one.dispatch) for one in machine.unmarked]
    older = [place for place in everywhere if sent[place][0].dispatch > sent[place][1]]
    return [place for place in older if sent[place][0].needs_publish] or everywhere


def _unsent(machine: Example) -> list[Job]:
    return [job for job in machine.model.having("queued") if job.needs_publish]


class Producing(Example):
    """ENQUEUE, PUBLISH, MARK, PROMOTE, and everything that may happen to a message."""

    @when(_few)
    @rule(unique_key=_unique_keys, delayed=st.booleans(), max_attempts=_limits, max_stalls=_limits)
    def enqueue(
        self, unique_key: str | None, *, delayed: bool, max_attempts: int | None, max_stalls: int | None
    ) -> None:
        """A client that cannot reach NATS leaves the message to the relay."""
        answer = self.world.run(
            self.world.client.enqueue(
                KIND,
                {},
                unique_key=unique_key,
                delay=3600.0 if delayed else 0.0,
                max_attempts=max_attempts,
                max_stalls=max_stalls,
            )
        )
        if holder := self.model.holder(unique_key):
            assert (answer.id, answer.created) == (holder.id, False)
            self.world.saw("enqueue: existing")
            return
        assert answer.created
        self.model.add(
            answer.id, unique_key=unique_key, delayed=delayed, attempts=max_attempts, stalls=max_stalls
        )
        self.world.saw("enqueue: delayed" if delayed else "enqueue: queued")

    @when(_few)
    @rule(unique_key=_unique_keys, marked=st.sampled_from(["at once", "late", "never"]), most=_limits)
    def enqueue_and_publish(self, unique_key: str | None, marked: str, most: int | None) -> None:
        """A client that reaches NATS sends its own message; the relay leaves it five seconds."""
        job_id = new_job_id()
        free = None if self.model.holder(unique_key) else unique_key
        call = enqueue.enqueue(
            self.world.database,
            KIND,
            NewJob(job_id, "{}", free, max_attempts=most, max_stalls=most),
            publish_after=5.0,
        )
        assert self.world.run(call).created
        self.world.stop_clock()
        job = self.model.add(job_id, unique_key=free, delayed=False, attempts=most, stalls=most)
        job.publish_due = False
        self._sent([job], [job.dispatch], marked, within_window=True)

    @when(_few)
    @rule(unique_keys=st.lists(_unique_keys, min_size=2, max_size=2))
    def enqueue_many(self, unique_keys: list[str | None]) -> None:
        answers = self.world.run(self.world.client.enqueue_many(KIND, [{}, {}], unique_keys=unique_keys))
        for answer, unique_key in zip(answers, unique_keys, strict=True):
            holder = self.model.holder(unique_key)
            assert answer.created == (holder is None)
            if holder is None:
                self.model.add(answer.id, unique_key=unique_key, delayed=False, attempts=None, stalls=None)
            else:
                assert answer.id == holder.id
            self.world.saw("enqueue many: created" if answer.created else "enqueue many: existing")

    @when(_unsent)
    @rule(
        stored=st.sampled_from([True, True, True, False]),
        marked=st.sampled_from(["at once", "at once", "late", "never"]),
        again=st.booleans(),
        within_window=st.booleans(),
    )
    def publish(self, marked: str, *, stored: bool, again: bool, within_window: bool) -> None:
        """A relay takes what is due; ``again``: also what an earlier publisher has not marked in its turn."""
        if again:
            self.world.end_publishers_turn()
            for job in _unsent(self):
                job.publish_due = True
        predicted = self.model.take_outgoing()
        taken = self.world.run(publish.take_outgoing(self.world.database, limit=100))
        self.world.stop_clock()
        said = {one.id: (one.dispatch, one.cleared, one.clear_reason) for one in taken}
        assert said == predicted
        self.world.saw("publish: taken", len(taken))
        if not taken:
            self.world.saw("publish: another publisher's turn")
        if stored and taken:
            jobs = self.model.in_order(said)
            self._sent(jobs, [said[job.id][0] for job in jobs], marked, within_window=within_window)
        elif taken:
            self.world.saw("publish: not stored")

    def _sent(self, jobs: list[Job], dispatches: list[int], marked: str, *, within_window: bool) -> None:
        sent = [
            self.messages.publish(job.name, job.id, dispatch, within_window=within_window)
            for job, dispatch in zip(jobs, dispatches, strict=True)
        ]
        if marked == "at once":
            self._mark(sent)
        elif marked == "late":
            self.unmarked += sent
        else:
            self.world.saw("publish: answer lost", len(sent))

    def _mark(self, sent: list[Sent]) -> None:
        predicted = self.model.mark(sent)
        assert self.world.run(publish.mark(self.world.database, sent)) == predicted
        self.world.saw("mark: taken", predicted)
        self.world.saw("mark: too late", len(sent) - predicted)

    @when(lambda machine: machine.unmarked)
    @rule(place=one_of(_places))
    def mark_late(self, place: int) -> None:
        """The answer of the stream reaches its publisher after whatever else has happened."""
        sent = self.unmarked.pop(place)
        job = self.model.jobs[sent.id]
        if job.needs_publish and job.dispatch > sent.dispatch:
            self.world.saw("mark: older dispatch")
        self._mark([sent])

    @when(lambda machine: machine.model.having("scheduled"))
    @rule(due=st.sampled_from([True, True, True, False]))
    def promote(self, *, due: bool) -> None:
        if due:
            self.world.make_due()
            for job in self.model.having("scheduled"):
                job.due = job.held_by is None
        predicted = self.model.promote()
        assert self.world.run(publish.promote(self.world.database, limit=100)) == predicted
        self.world.saw("promote: taken" if predicted else "promote: not due")

    @when(lambda machine: machine.messages.held)
    @rule(
        messages=some_of(lambda machine: machine.messages.held), fault=st.sampled_from(["lost", "duplicated"])
    )
    def disturb(self, messages: list[Message], fault: str) -> None:
        """The stream loses messages, or delivers them more than once."""
        for message in messages:
            if fault == "lost":
                self.messages.remove(message)
            elif len(self.messages.held) < MOST_MESSAGES:
                copy = Message(message.name, message.job_id, message.dispatch, message.kind)
                self.messages.held.append(copy)
        self.world.saw(f"message: {fault}")

    @when(lambda machine: len(machine.messages.held) < MOST_MESSAGES)
    @rule(
        job=one_of(lambda machine: [None, *machine.model.all()]),
        dispatch=st.integers(0, 5),
        kind=st.sampled_from([KIND, OTHER_KIND]),
    )
    def forge_message(self, job: Job | None, dispatch: int, kind: str) -> None:
        """A message is published that belongs to no dispatch."""
        name, job_id = (job.name, job.id) if job else ("nobody's job", UUID(int=0))
        self.messages.held.append(Message(name, job_id, dispatch, kind))
        self.world.saw("message: forged")
