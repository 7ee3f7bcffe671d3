"""One arrival of a message, and the answers that JetStream understands."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from jsworker.stream.wire import MalformedMessage, decode

Answer = Callable[[bytes, bytes], None]
"""Sends a verdict to a reply subject; neither waits nor raises."""

_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_TERM: Final = b"+TERM"
_IN_PROGRESS: Final = b"+WPI"
_PREFIX: Final = b"$JS.ACK."
_INT64: Final = 2**63 - 1


class _Arrival:
    """What was delivered and how to answer it.

    Answers are sent and not waited for: one that gets lost costs a redelivery, and the row decides what that
    is worth. A message is answered once; every further answer does nothing.

    Attributes:
        subject: where the message was published.
        data: its content.
        stream_seq: its number in the stream.
        answered: a final answer was given: ``ack``, ``nak`` or ``term``.
    """

    __slots__ = ("_answer", "_reply", "_stored_ns", "answered", "data", "stream_seq", "subject")

    def __init__(  # noqa: PLR0917 -- called for every message
        self, subject: str, reply: bytes, data: bytes, stream_seq: int, stored_ns: int, answer: Answer
    ) -> None:
        self.subject = subject
        self.data = data
        self.stream_seq = stream_seq
        self.answered = False
        self._stored_ns = stored_ns
        self._reply = reply
        self._answer = answer

    @property
    def stored_at(self) -> datetime:
        """When the stream stored the message (UTC); a redelivery does not change it."""
        return datetime.fromtimestamp(self._stored_ns / 1e9, UTC)

    def ack(self) -> None:
        """Done: the stream forgets the message."""
        self._finish(_ACK)

    def nak(self, delay: float = 0.0) -> None:
        """Not now: the message is delivered again, to whoever asks, after ``delay`` seconds."""
        self._finish(b'%b {"delay":%d}' % (_NAK, round(delay * 1e9)) if delay > 0 else _NAK)

    def term(self) -> None:
        """Never again: the stream forgets a message that nobody can use."""
        self._finish(_TERM)

    def in_progress(self) -> None:
        """Still at it: the consumer's ``ack_wait`` starts anew."""
        if not self.answered:
            self._answer(self._reply, _IN_PROGRESS)

    def _finish(self, verdict: bytes) -> None:
        if not self.answered:
            self.answered = True
            self._answer(self._reply, verdict)


class Delivery(_Arrival):
    """A message that names a job.

    Attributes:
        job_id: the job that wants to be looked at.
        kind: its kind, which is also the consumer's.
        dispatch: which entry into the queue the message belongs to.
        num_delivered: how often it was delivered, with this time, as far as the server knows.
    """

    __slots__ = ("dispatch", "job_id", "kind", "num_delivered")

    job_id: UUID
    kind: str
    dispatch: int
    num_delivered: int

    def __repr__(self) -> str:
        return f"<Delivery {self.stream_seq} of {self.kind} {self.job_id}:{self.dispatch}>"


class Undecodable(_Arrival):
    """A message that cannot be read.

    Attributes:
        reason: the rule it breaks; never its content.
    """

    __slots__ = ("reason",)

    reason: str

    def __repr__(self) -> str:
        return f"<Undecodable {self.stream_seq} on {self.subject}: {self.reason}>"


def read(
    subject: str, reply: bytes, data: bytes, *, kind: str, answer: Answer
) -> Delivery | Undecodable | None:
    """Return what a consumer of ``kind`` delivered; None when it was not JetStream that sent it."""
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<stored ns>.<pending>, in newer
    # replies with <domain>.<account> before <stream> and a random token at the end.
    tokens = reply.split(b".")
    first = 5 if len(tokens) == 9 else 7
    try:
        num_delivered, stream_seq, stored_ns = (
            int(tokens[first - 1]),
            int(tokens[first]),
            int(tokens[first + 2]),
        )
    except (ValueError, IndexError):
        return None
    if not (reply.startswith(_PREFIX) and 0 <= stream_seq <= _INT64 and 0 <= stored_ns <= _INT64):
        return None
    try:
        message = decode(data, subject_kind=kind)
    except MalformedMessage as fault:
        unread = Undecodable(subject, reply, data, stream_seq, stored_ns, answer)
        unread.reason = str(fault)
        return unread
    delivery = Delivery(subject, reply, data, stream_seq, stored_ns, answer)
    delivery.job_id = message.job_id
    delivery.kind = kind
    delivery.dispatch = message.dispatch
    delivery.num_delivered = num_delivered
    return delivery
