"""What the owner of a job and the isolated process that runs it send each other."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter

from jsworker.core.message_link import Message
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.enqueue import ChildJob
from jsworker.worker.pipeline.in_flight import StopReason
from jsworker.worker.pipeline.outcomes import Outcome
from jsworker.worker.stacks import Stack


class Order(Message):
    """All that the isolated process needs to run a job for its owner; the first message.

    ``origin`` is what makes the processor, ``middleware`` what its worker was given, ``path`` the owner's
    ``sys.path``, ``kinds`` what it serves. The settings hold secrets: they pass through the socket alone.
    """

    what: Literal["order"] = "order"
    origin: str
    middleware: tuple[str, ...]
    path: list[str]
    worker_id: str
    settings: Settings
    claimed: ClaimedJob
    kinds: frozenset[str]


class Request(Message):
    """What the owner wants: that the job sees its drain, that the run ends, or to know where the run is."""

    what: Literal["drain", "stop", "ask stacks"]
    reason: StopReason | None = None
    """Why the run is to end."""


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


class RunEnded(Message):
    """The last message; ``completed``: whether the job's own transaction has completed it.

    ``child_jobs`` are enqueued with its completion, or were by that transaction.
    """

    # The fields tell outcomes apart: none may have those of another.
    model_config = ConfigDict(extra="forbid")

    what: Literal["ended"] = "ended"
    outcome: Outcome
    completed: bool
    child_jobs: list[ChildJob]


FromOwner: TypeAlias = Order | Request
FromIsolated: TypeAlias = RunState | RunStacks | RunEnded

_BY_WHAT: Final = Field(discriminator="what")
FROM_OWNER: Final = TypeAdapter[FromOwner](Annotated[FromOwner, _BY_WHAT])
FROM_ISOLATED: Final = TypeAdapter[FromIsolated](Annotated[FromIsolated, _BY_WHAT])
