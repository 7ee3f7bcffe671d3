"""A worker's status: the facts it has without asking a server, and the result of its last server survey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from jsworker.core.events import Events

if TYPE_CHECKING:  # a parent of workers imports no SQLAlchemy
    from jsworker.ownership.queries.job_report import Waiting

MOST_KINDS: Final = 200
"""The most kinds with figures of their own in one process: its own kinds first, then those of others."""
OTHER_KINDS: Final = "_other"
"""Stands for all other kinds; no kind can have this name."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a worker can do all its work at this moment.

    Attributes:
        postgresql: whether PostgreSQL answers and accepts every statement.
        migration: revision of the database's schema when it was last read; None: there is no schema.
        pulling: whether the worker asks for messages of every kind.
        problems: what else does not work, in a few words.
        schema_mismatch: why the schema does not fit this version, and what to do; None: it fits.
        publishing: whether JetStream stores messages, as far as is known.
        drained: whether an operator has drained the worker: it claims nothing, all else works.
        refusal: why PostgreSQL refuses a statement; None: it refuses none, or does not answer.
        silence: why PostgreSQL does not answer, or lately did not for lack of a connection; None: it does.
        answered: whether PostgreSQL answered the last statement.
    """

    postgresql: bool
    nats: bool
    migration: str | None
    pulling: bool
    draining: bool
    problems: Sequence[str]
    schema_mismatch: str | None = None
    publishing: bool = True
    drained: bool = False
    refusal: str | None = None
    silence: str | None = None
    answered: bool = False


class IsolatedProcesses(NamedTuple):
    """A worker's child processes for isolated jobs: busy ones run a job, idle ones are ready for one."""

    busy: int = 0
    idle: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker at this moment.

    Attributes:
        in_flight: runs by kind: waiting for a job slot, running, or being settled.
        heartbeat_lag: seconds since the start of the last heartbeat that was answered.
        event_loop_lag: seconds by which the event loop was late, at most, within the last half minute.
        pools: connections to PostgreSQL by pool: how many are lent, and how many may be.
        events_dropped: events for plain subscribers that were not sent.
    """

    readiness: Readiness
    in_flight: Mapping[str, int]
    heartbeat_lag: float
    event_loop_lag: float
    pools: Mapping[str, tuple[int, int]]
    recovers_by: Mapping[str, bool]
    isolated: IsolatedProcesses
    events_dropped: int = 0


class KindQueue(NamedTuple):
    """One kind's live jobs in the table, and its messages in the stream; None: unknown."""

    waiting: "Waiting"
    pending: int | None
    unacknowledged: int | None

    @property
    def drift(self) -> int | None:
        """Jobs that expect a message in the stream, minus the messages that are there; None: unknown."""
        if self.pending is None or self.unacknowledged is None:
            return None
        jobs = self.waiting.jobs
        expecting = jobs["queued"] - self.waiting.to_publish + jobs["processing"]
        return expecting - self.pending - self.unacknowledged


@dataclass(frozen=True, slots=True)
class Fleet:
    """The result of a survey of both servers: the same for every worker of an installation.

    Attributes:
        queues: by kind; kinds without figures of their own are counted together as ``OTHER_KINDS``.
        outbox_jobs: queued jobs whose message is still to be sent.
        outbox_oldest_seconds: for how long the oldest of these jobs has been queued.
        refused_rows: jobs that are set aside because PostgreSQL refuses their row, by what was attempted.
        workflows_left_seconds: for how long the surveys have seen a batch or workflow that is not finished
            although all its jobs have ended.
    """

    queues: Mapping[str, KindQueue]
    outbox_jobs: int
    outbox_oldest_seconds: float
    dead_messages: int
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    workflows_left_seconds: float = 0.0


class Observed(Protocol):
    """The part of a worker that its figures need."""

    events: Events

    def status(self) -> WorkerStatus | None:
        """Return its status; None before it has started."""

    def fleet(self) -> Fleet | None:
        """Return the result of its last survey; None: it makes no surveys, or had no answer lately."""


class KindLabels:
    """Labels of kinds: the first kinds have their own, all later ones share one. Thread-safe."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def label(self, kind: str) -> str:
        """Return the label of a kind; the number of labels is bounded, whatever kinds producers use."""
        if kind in self._labels or len(self._labels) < MOST_KINDS:
            return self._labels.setdefault(kind, kind)
        return OTHER_KINDS
