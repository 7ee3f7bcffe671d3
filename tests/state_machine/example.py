"""The state of one example, and what is checked after every step whatever the step was."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition
from hypothesis.strategies._internal.featureflags import FeatureFlags

from jsworker.ownership.transitions import republish, workers
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.ownership.transitions.publish import Sent
from jsworker.ownership.transitions.settle import Settled

from .invariants import Right, violations
from .lives import HOSTNAMES, ClaimInFlight, Life, Run
from .model import Gone, Job, Model, Sighting
from .stream import Message, Messages
from .world import Row, Rows, World

T = TypeVar("T")

Step = Callable[..., None]


def one_of(choose: Callable[[Any], Sequence[T]]) -> st.SearchStrategy[T]:
    """Return a strategy for one of the things that the machine has at that moment."""
    return st.runner().flatmap(lambda machine: st.sampled_from(choose(machine)))


def some_of(choose: Callable[[Any], Sequence[T]], *, most: int = 3) -> st.SearchStrategy[list[T]]:
    """Return a strategy for a few different ones of the things that the machine has at that moment."""
    return st.runner().flatmap(
        lambda machine: st.lists(st.sampled_from(choose(machine)), min_size=1, max_size=most, unique=True)
    )


def when(choose: Callable[[Any], object]) -> Callable[[Step], Step]:
    """Offer a rule only when there is something to choose from."""
    return precondition(lambda machine: bool(choose(machine)))


class _EveryRule(FeatureFlags):
    """Instead of a random choice of rules for each example: where few rules take part, little happens."""

    def is_enabled(self, name: Any) -> bool:  # noqa: ARG002 -- Hypothesis asks by name
        return True


class Example(RuleBasedStateMachine):
    """Jobs, messages and workers of one example, beside the model that predicts every answer and row."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._rules_strategy.enabled_rules_strategy = st.just(_EveryRule())
        self.world = world
        self.model = Model()
        self.messages = Messages()
        self.most_live = 1
        self.lives: list[Life] = []
        self.in_flight: list[ClaimInFlight] = []
        self.unmarked: list[Sent] = []
        self.sightings: list[Sighting] = []
        self.gone: list[Gone] = []
        self.outcomes: dict[Held, tuple[Life, Settled]] = {}
        self.completions: Counter[UUID] = Counter()
        self._rows: Rows = {}
        self._rights: list[Right] = []
        self._retried: set[UUID] = set()
        world.empty()
        self.start(HOSTNAMES[0])

    # -- what rules choose from

    @property
    def alive(self) -> list[Life]:
        return [life for life in self.lives if life.alive]

    @property
    def dead(self) -> list[Life]:
        """Return killed workers that are not marked as stopped or that still hold jobs."""
        return [
            life
            for life in self.lives
            if not life.alive and not (life.buried and not self.model.owned_by(life.id))
        ]

    @property
    def runs(self) -> list[Run]:
        return [run for life in self.lives for run in life.runs]

    @property
    def superseded(self) -> list[Run]:
        """Return runs whose worker owns the job again, with a newer token."""
        return [run for run in self.runs if run.job.worker_id == run.life.id and run.job.token > run.token]

    @property
    def working(self) -> list[Life]:
        return [life for life in self.alive if life.in_hand]

    # -- parts of steps

    def start(self, hostname: str) -> Life:
        """Let a worker process begin to live."""
        life = Life(f"{hostname}-1-{len(self.lives):08x}", hostname)
        self.lives.append(life)
        self.world.run(workers.seen(self.world.database, life.registration(), state="running"))
        return life

    def adopt(self, life: Life, claimed: Iterable[ClaimedJob], message: dict[UUID, Message]) -> None:
        """Begin the runs of jobs that a worker got the answer that it owns."""
        row_of = {row.id: row for row in claimed}
        for job in self.model.in_order(row_of):
            row = row_of[job.id]
            assert (row.dispatch, row.attempt, row.stalls) == (job.dispatch, job.attempts, job.stalls)
            assert (row.max_attempts, row.max_stalls) == (job.max_attempts, job.max_stalls)
            assert (row.cleared, row.cancel_requested) == (job.cleared, job.cancel_requested)
            assert not job.cleared or row.clear_reason == job.clear_reason
            # What is read back comes without its texts, which are fetched as the run begins.
            assert row.checkpoint == (None if row.payload is None else job.checkpoint)
            twins = [run for run in self.runs if run.held == (row.id, row.fencing_token)]
            assert not twins, f"S2 {twins[0]} is run a second time by {life}"
            life.runs.append(Run(life, job, row.fencing_token, row.dispatch, message.get(row.id)))

    def may_end(self, *rights: Right) -> None:
        """State by which right this step may end runs."""
        self._rights += rights

    def owner_may_end(self, life: Life, token_of: dict[UUID, int]) -> None:
        """State that this step is the owner's own."""
        self.may_end(
            lambda row: row["worker_id"] == life.id and row["fencing_token"] == token_of.get(row["id"])
        )

    def is_retried(self, job: Job) -> None:
        """State that this step retries a job, and holds again what was cancelled for it."""
        self._retried = {job.id, *(one.id for one in self.model.all() if one.is_cancelled_for_needs)}

    def settled(self, run: Run, answer: Settled) -> None:
        """Take the answer to the end of a run, which must be the same for ever."""
        run.in_hand = False
        self.messages.remove(run.message)
        if answer is Settled.LOST:
            assert run.held not in self.outcomes or self.outcomes[run.held][0] is not run.life
            return
        first = self.outcomes.setdefault(run.held, (run.life, answer))
        assert first == (run.life, answer), f"S2 {run} has two outcomes: {first} and {answer}"

    # -- what holds after every step

    @invariant()
    def protocol_holds(self) -> None:
        before, after = self._rows, self.world.rows()
        found = list(violations(before, after, rights=self._rights, retried=self._retried))
        assert not found, "; ".join(found)
        self._rows, self._rights, self._retried = after, [], set()
        for job_id, row in after.items():
            was = before[job_id]["status"] if job_id in before else None
            self.completions[job_id] += row["status"] == "completed" and was != "completed"
            assert self.completions[job_id] <= 1, f"S2 job {job_id} was completed twice"
        self._every_queued_job_is_found(after)
        self._rows_are_as_predicted(after)

    def _every_queued_job_is_found(self, rows: Rows) -> None:
        queued = [row for row in rows.values() if row["status"] == "queued" and not row["needs_publish"]]
        for row in queued:
            stored = (row["id"], row["dispatch"]) in self.messages.stored
            assert stored, f"S7 job {row['id']} is marked, dispatch {row['dispatch']} was never published"
        if all(self.messages.naming(row["id"], row["dispatch"]) for row in queued):
            return
        database = self.world.database
        posted = republish.posted(database, after=None, older_than=0.0, limit=100)
        found = {one.id for one in self.world.run(posted)}
        missed = [row["id"] for row in queued if row["id"] not in found]
        assert not missed, f"S7 no message names {missed} and no sweep finds them"

    def _rows_are_as_predicted(self, rows: Rows) -> None:
        assert rows.keys() == self.model.jobs.keys()
        for job in self.model.all():
            row, predicted = rows[job.id], job.columns()
            differences = [
                f"{column} {_column(row, column)!r}, not {value!r}"
                for column, value in predicted.items()
                if _column(row, column) != value
            ]
            assert not differences, f"{job}: " + ", ".join(differences)


def _column(row: Row, column: str) -> object:
    if column == "finished":
        return row["finished_at"] is not None
    if column == "clear_reason":
        return row["clear_reason"] if row["cleared"] else None
    return row[column]
