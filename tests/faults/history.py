"""What happened in a fault run, as plain data: the checker reads this and nothing else.

All times are seconds of this machine's boot time, which counts on while the machine is suspended.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SLOTS_EXHAUSTED = "connection_slots_exhausted"
"""The fault in which no parent may end: it and its children wait for a connection."""

_SLACK_SECONDS = 0.05

FINAL = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a producer to enqueue a job.

    Attributes:
        outcome: ``ok``, ``fail`` (certainly not stored), or ``unknown`` (no answer came).
        job: the id it was told; None without an answer.
    """

    key: str
    kind: str
    outcome: str
    job: str | None
    at: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as the database had it at the end.

    Attributes:
        workflow: the name of the one to which it belongs.
        schedule: the name of the one whose instant it is.
    """

    id: str
    key: str | None
    kind: str
    status: str
    token: int
    attempts: int
    errors: int
    stalls: int
    dispatch: int
    reason: str | None
    result_token: int | None
    created: float
    workflow: str | None = None
    schedule: str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a job's status, token or dispatch, as a trigger of the harness recorded it.

    Attributes:
        seq: rises in the order of commits, for each job.
        owner: who owned the job before; ``worker``: who owns it after.
        silent_for: seconds since the old owner's last sign of life.
        allowed: seconds of silence that the row allowed its owner.
    """

    seq: int
    job: str
    at: float
    was: str
    now: str
    old_token: int
    token: int
    dispatch: int
    owner: str | None
    worker: str | None
    errors: int
    stalls: int
    silent_for: float | None
    allowed: float | None

    @property
    def is_claim(self) -> bool:
        """Whether somebody took the job: from the queue, or from a stale owner."""
        return self.now == "processing" and self.token > self.old_token


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a job's timeline."""

    job: str
    at: float
    event: str
    worker: str | None
    token: int | None
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One execution, as the process that did it recorded it.

    Attributes:
        end: None for one that its process did not live to end.
        how: ``finish``, ``broken`` or None.
    """

    job: str
    kind: str
    token: int
    pid: int
    start: float
    end: float | None
    how: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What the harness did, to whom.

    Attributes:
        touches: any of ``process`` (killed or stopped), ``loop`` (the event loop blocked), ``database``,
            ``nats`` (unreachable, slow or refusing), ``rows`` (locked, see jobs) and ``messages``.
        pods: hostnames; empty: everybody.
        pids: processes that were killed or stopped by this very fault.
        jobs: jobs that it was about.
        ended: processes of pods that were told to stop.
        fired: whether it found anything to harm.
    """

    name: str
    start: float
    end: float
    touches: frozenset[str]
    pods: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()
    jobs: frozenset[str] = frozenset()
    fired: bool = True

    def hits(self, pod: str, start: float, end: float, touches: Iterable[str]) -> bool:
        """Tell whether it touched a pod in one of these ways within a time."""
        return (
            bool(self.touches.intersection(touches))
            and (not self.pods or pod in self.pods)
            and self.start <= end
            and self.end >= start
        )


@dataclass(frozen=True, slots=True)
class Effect:
    """A transactional effect, or an accepted fenced one, in the order of acceptance."""

    job: str
    token: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """An operator's wish to cancel a job.

    Attributes:
        start, end: when it was asked and answered; by the wall clock, until ``read_database``.
        heard: whether the job was cancelled, or its owner asked to stop.
    """

    job: str
    start: float
    end: float
    heard: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """A pod's parent that ended without being killed or told to.

    Attributes:
        code: its exit code.
        words: the end of its log.
    """

    pod: str
    at: float
    code: int
    words: str


@dataclass(frozen=True)
class Life:
    """One process that runs jobs: when its event loop, and a thread of it, gave signs of life.

    Attributes:
        parent: the process that started it: a supervisor, or the worker whose job runs alone in it.
    """

    pid: int
    pod: str
    ticks: tuple[float, ...]
    threads: tuple[float, ...] = ()
    ended: bool = False
    parent: int | None = None

    @property
    def first_sign(self) -> float | None:
        """When it first gave a sign of life; None: never."""
        return min((*self.ticks[:1], *self.threads[:1]), default=None)

    @property
    def last_sign(self) -> float | None:
        """When it last gave a sign of life; None: never."""
        return max((*self.ticks[-1:], *self.threads[-1:]), default=None)


@dataclass
class History:
    """Everything that the checker may know.

    Attributes:
        forged: keys under which forged messages went out; no job may come of them.
        quiet_since: when all faults were off; drained: when every job had ended, None: never.
        slow: times in which PostgreSQL or the harness itself was slow although nothing was done to either:
            the machine was too busy for the time scale.
        log_events: events of the workers' logs, counted by name.
        refusals: statements of the protocol that a constraint or the guard trigger refused.
        published: messages that the stream took, as far as could be counted.
        crowded: times in which processes waited for a processor for most of the time; a worker may then
            well give its jobs back, but nobody may take them unless it said that it could not renew them.
        failed_heartbeats: by worker, when it said that it could not renew its heartbeat.
        stops: by worker, when it said that it stopped a run of its own, and of which job.
        workflows: names of workflows by their ids.
        batches: how many batches have finished, again after a retry too.
        broken: what broke a rule of ``flow_control``, by rule.
        idle: what nobody looked after, from when to when.
        must_fire: nemeses that were asked for.
        must_see: what must have happened at least once, as ``seen_paths`` names it.
    """

    started: float = 0.0
    quiet_since: float = 0.0
    drained: float | None = None
    tries: list[Try] = field(default_factory=list)
    jobs: dict[str, JobRow] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    ledger: list[Effect] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    slow: list[tuple[float, float]] = field(default_factory=list)
    crowded: list[tuple[float, float]] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    log_events: dict[str, int] = field(default_factory=dict)
    failed_heartbeats: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stops: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    published: int = 0
    workflows: dict[str, str] = field(default_factory=dict)
    batches: int = 0
    broken: set[tuple[str, str, str]] = field(default_factory=set)
    idle: list[tuple[str, float, float]] = field(default_factory=list)
    must_fire: frozenset[str] = frozenset()
    must_see: frozenset[str] = frozenset()

    @cached_property
    def _lives_by_pid(self) -> dict[int, list[Life]]:
        found: dict[int, list[Life]] = defaultdict(list)
        for life in sorted(self.lives, key=lambda life: life.first_sign or 0.0):
            found[life.pid].append(life)
        return found

    def life_of(self, pid: int, at: float) -> Life | None:
        """Return the process that had this id then, or has had it last: in a long run ids are given anew."""
        begun = [
            life
            for life in self._lives_by_pid.get(pid, ())
            if (life.first_sign or 0.0) <= at + _SLACK_SECONDS
        ]
        return begun[-1] if begun else None

    @cached_property
    def moves_of(self) -> dict[str, list[Move]]:
        """Moves by job, in the order of their commits."""
        found: dict[str, list[Move]] = defaultdict(list)
        for move in sorted(self.moves, key=lambda move: move.seq):
            found[move.job].append(move)
        return found

    @cached_property
    def runs_of(self) -> dict[str, list[Run]]:
        """Runs by job, the first ones first."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.start):
            found[run.job].append(run)
        return found


def pid_of(worker: str) -> int:
    """Return the process id in a worker's id (``hostname-pid-random``); 0 when there is none."""
    parts = worker.rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0


def pod_of(worker: str) -> str:
    """Return the hostname in a worker's id."""
    return worker.rsplit("-", 2)[0]
