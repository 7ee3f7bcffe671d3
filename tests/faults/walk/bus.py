"""Messages as JetStream treats them: stored once for each message id, redelivered until acked."""

import random
from dataclasses import dataclass
from uuid import UUID

from jsworker.core.clock import boottime

ACK_WAIT_SECONDS = 0.4


@dataclass(slots=True)
class Message:
    """A stored message: to be delivered at ``due``, again and again until it is acked."""

    job: UUID
    dispatch: int
    due: float = 0.0


class Bus:
    """One work queue for all workers.

    Attributes:
        loss: share of messages that are stored, acknowledged, and then gone.
        ids_of_jobs: whether a job's id alone is the message id (a mutant).
    """

    def __init__(self, dice: random.Random, *, ids_of_jobs: bool) -> None:
        self.loss = 0.0
        self._ids_of_jobs = ids_of_jobs
        self._dice = dice
        self._messages: list[Message] = []
        self._known: set[object] = set()

    def publish(self, job: UUID, dispatch: int) -> None:
        """Store a message, unless one with its id is known."""
        message_id: object = job if self._ids_of_jobs else (job, dispatch)
        if message_id in self._known:
            return
        self._known.add(message_id)
        if self._dice.random() >= self.loss:
            self._messages.append(Message(job, dispatch))

    def deliver(self) -> Message | None:
        """Return a message that is due, for ``ACK_WAIT_SECONDS``."""
        now = boottime()
        due = [message for message in self._messages if message.due <= now]
        if not due:
            return None
        message = self._dice.choice(due[:8])
        message.due = now + ACK_WAIT_SECONDS
        return message

    def ack(self, message: Message) -> None:
        """Forget a message."""
        if message in self._messages:
            self._messages.remove(message)

    def nak(self, message: Message, delay: float) -> None:
        """Deliver a message again after ``delay`` seconds."""
        message.due = boottime() + delay

    def holds(self, job: UUID, dispatch: int) -> bool:
        """Tell whether a message of this dispatch is still there, as a sweep must know."""
        return any(message.job == job and message.dispatch == dispatch for message in self._messages)
