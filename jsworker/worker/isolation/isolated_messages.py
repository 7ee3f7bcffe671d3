"""What the owner of jobs and an isolated process that runs them send each other."""

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter

from jsworker.core.message_link import Message
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.enqueue import ChildJob
from jsworker.worker.pipeline.in_flight import StopReason
from jsworker.worker.pipeline.outcomes import Outcome
from jsworker.worker.stacks import Stack


class Introduction(Message):
    """What an isolated process needs to know of its owner, whatever it runs; the first message.

    ``path`` is the owner's ``sys.path``, ``kinds`` what it serves, ``from_files`` which settings the process
    may read again, as its owner does. The settings hold secrets: they pass through the socket alone.
    """

    what: Literal["introduction"] = "introduction"
    path: list[str]
    worker_id: str
    settings: Settings
    from_files: frozenset[str]
    kinds: frozenset[str]


class Preparation(Message):
    """Make the processor of an origin and set it up; answered by ``Prepared``.

    ``middleware``: the origins of what its worker was given.
    """

    what: Literal["prepare"] = "prepare"
    origin: str
    middleware: tuple[str, ...]


class Order(Message):
    """A job to run; its kind is prepared. ``wanted``: names of events that the owner listens to."""

    what: Literal["order"] = "order"
    claimed: ClaimedJob
    wanted: frozenset[str] = frozenset()


class Request(Message):
    """What the owner wants: that the run sees the drain, ends, or tells where it is; or the end of all."""

    what: Literal["drain", "stop", "ask stacks", "end"]
    reason: StopReason | None = None
    """Why the run is to end."""


class Prepared(Message):
    """A processor is set up, or why it is not; the process that could not is of no more use."""

    what: Literal["prepared"] = "prepared"
    error: str | None


class IdleTick(Message):
    """The event loop ticks, and no job runs."""

    what: Literal["tick"] = "tick"


class RunState(Message):
    """The event loop ticks; how the run is. Moments are boot times."""

    what: Literal["state"] = "state"
    sign_at: FiniteFloat
    quiet_seconds: FiniteFloat
    quiet_until: FiniteFloat


class RunStacks(Message):
    """Where the run is."""

    what: Literal["stacks"] = "stacks"
    stacks: list[Stack]


class RunEvent(Message):
    """An event of the run, for listeners of its owner."""

    what: Literal["event"] = "event"
    name: Literal["job.progress", "job.step"]
    fields: dict[str, Any]


class JobsAdded(Message):
    """The run has enqueued jobs that wait to be published."""

    what: Literal["added"] = "added"


class RunEnded(Message):
    """The last message of a run; ``completed``: whether the job's own transaction has completed it.

    ``child_jobs`` are enqueued with its completion, or were by that transaction. ``lacks``: what the process
    has too little of for another job.
    """

    # The fields tell outcomes apart: none may have those of another.
    model_config = ConfigDict(extra="forbid")

    what: Literal["ended"] = "ended"
    outcome: Outcome
    completed: bool
    child_jobs: list[ChildJob]
    lacks: Literal["files", "threads"] | None = None


class TeardownFailed(Message):
    """A processor could not be torn down, and why."""

    what: Literal["teardown"] = "teardown"
    kind: str
    reason: str


FromOwner: TypeAlias = Introduction | Preparation | Order | Request
FromIsolated: TypeAlias = (
    Prepared | IdleTick | RunState | RunStacks | RunEvent | JobsAdded | RunEnded | TeardownFailed
)

_BY_WHAT: Final = Field(discriminator="what")
FROM_OWNER: Final = TypeAdapter[FromOwner](Annotated[FromOwner, _BY_WHAT])
FROM_ISOLATED: Final = TypeAdapter[FromIsolated](Annotated[FromIsolated, _BY_WHAT])
