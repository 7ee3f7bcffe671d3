"""The messages of an example: a list from which anything may be lost and to which anything may be added."""

from dataclasses import dataclass, field
from uuid import UUID

from jsworker.ownership.transitions.publish import Sent

from .model import KIND


@dataclass(eq=False, repr=False)
class Message:
    """A hint to look at a job; ``name`` is for the report of a failure."""

    name: str
    job_id: UUID
    dispatch: int
    kind: str = KIND

    def __repr__(self) -> str:
        return f"{self.name} at dispatch {self.dispatch}" + f" as {self.kind}" * (self.kind != KIND)


@dataclass
class Messages:
    """What the stream holds, and what was ever stored in it by a publisher.

    Attributes:
        held: messages that a worker can be given, those of runs in hand and of killed workers included.
        stored: every id and dispatch that the stream has acknowledged.
    """

    held: list[Message] = field(default_factory=list)
    stored: dict[tuple[UUID, int], int] = field(default_factory=dict)

    def publish(self, name: str, job_id: UUID, dispatch: int, *, within_window: bool = True) -> Sent:
        """Store a message, unless the stream still remembers its ``id:dispatch``."""
        known = (job_id, dispatch) in self.stored
        if not (known and within_window):
            self.held.append(Message(name, job_id, dispatch))
            self.stored[job_id, dispatch] = len(self.stored) + 1
        return Sent(job_id, dispatch, self.stored[job_id, dispatch], None)

    def remove(self, message: Message | None) -> None:
        """Acknowledge or lose a message; the second acknowledgement of one finds nothing."""
        if message in self.held:
            self.held.remove(message)

    def naming(self, job_id: UUID, dispatch: int | None = None) -> list[Message]:
        """Return the messages that name a job, at any dispatch or at one."""
        return [one for one in self.held if one.job_id == job_id and dispatch in (None, one.dispatch)]
