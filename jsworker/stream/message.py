"""The message: what it holds on the wire, one delivery of it, and the answers that JetStream understands."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Annotated, Final, NamedTuple
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json
from typing_extensions import TypedDict

from jsworker.core.errors import JsworkerError
from jsworker.core.priorities import NORMAL, PRIORITIES

VERSION: Final = 1

LIMIT_BYTES: Final = 65_536
"""Largest message that a stream takes and a worker reads."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9-]+")
_HEADER_VALUE: Final = re.compile(r"[^\r\n\0]*")
_REASON_CHARACTERS: Final = 1_000
_INT64: Final = 2**63 - 1
_WILDCARDS: Final = frozenset({"*", ">"})

SendVerdict = Callable[[bytes, bytes], None]
"""Sends a verdict to a reply subject; neither waits nor raises."""


class MalformedMessage(JsworkerError):
    """A message cannot be read. The text names the rule that it breaks and never shows its content."""


class WireMessage(NamedTuple):
    """The content of a message: a hint to look at a job, whose payload stays in the row.

    ``dispatch`` counts the job's entries into the queue from 1. ``cleared`` and ``clear_reason`` are for
    logs. The ``priority`` chooses the subject and is not sent.
    """

    job_id: UUID
    kind: str
    dispatch: int
    cleared: bool = False
    clear_reason: str | None = None
    priority: int = NORMAL


class _Fields(TypedDict):
    v: Annotated[int, Field(ge=VERSION, le=VERSION)]
    job_id: UUID
    kind: str
    dispatch: Annotated[int, Field(ge=1, le=_INT64)]
    cleared: bool
    clear_reason: str | None


_RULES: Final = {
    "v": f"wrong version: v must be {VERSION}",
    "job_id": "job_id must be a UUID",
    "kind": "kind must be a text",
    "dispatch": f"dispatch must be an integer from 1 to {_INT64}",
    "cleared": "cleared must be true or false",
    "clear_reason": "clear_reason must be a text or null",
}

_validate = TypeAdapter(_Fields).validator.validate_json


def subject_of(prefix: str, kind: str, priority: int = NORMAL) -> str:
    """Return the subject on which messages of a kind and priority are published; no kind holds a dot."""
    return f"{prefix}.{kind}" if priority == NORMAL else f"{prefix}.{kind}.{PRIORITIES[priority]}"


def is_literal(subject: str) -> bool:
    """Return whether no token of a subject acts as a wildcard, for example in a purge."""
    return _WILDCARDS.isdisjoint(subject.split("."))


def overlap(one: str, other: str) -> bool:
    """Return whether there are subjects that match both of these, which may hold wildcards."""
    for token, others in zip_longest(one.split("."), other.split(".")):
        if token is None or others is None:
            return False
        if ">" in (token, others):
            return True
        if token != others and "*" not in (token, others):
            return False
    return True


def consumer_of(kind: str, priority: int = NORMAL) -> str:
    """Return the name of the consumer of a kind and priority: the kind's, or one that no kind can have."""
    return kind if priority == NORMAL else f"{kind}={PRIORITIES[priority]}"


def lane_of(consumer: str) -> tuple[str, int]:
    """Return kind and priority of a consumer of this name."""
    kind, _, priority = consumer.rpartition("=")
    return (kind, PRIORITIES.index(priority)) if kind and priority in PRIORITIES else (consumer, NORMAL)


def message_id(job_id: UUID, dispatch: int) -> str:
    """Return the ``Nats-Msg-Id``: a new dispatch is a new message to JetStream's duplicate window."""
    return f"{job_id}:{dispatch}"


def header_block(message: WireMessage, extra: Mapping[str, str] | None) -> bytes:
    """Return the message's headers as NATS sends them; an extra one must be one line with a plain name."""
    lines = f"NATS/1.0\r\nNats-Msg-Id: {message_id(message.job_id, message.dispatch)}\r\n"
    for name, value in (extra or {}).items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"header {name!r} must be one line of text with a name of letters, digits and '-'"
            )
        lines += f"{name}: {value}\r\n"
    return f"{lines}\r\n".encode()


def encode(message: WireMessage) -> bytes:
    """Return the message as JSON. A long ``clear_reason`` is cut, so that the message always fits."""
    reason = message.clear_reason
    return to_json(
        {
            "v": VERSION,
            "job_id": message.job_id,
            "kind": message.kind,
            "dispatch": message.dispatch,
            "cleared": message.cleared,
            "clear_reason": reason if reason is None else reason[:_REASON_CHARACTERS],
        }
    )


def decode(data: bytes, *, subject_kind: str) -> WireMessage:
    """Read a message of a kind's consumer, or raise MalformedMessage; further fields are ignored."""
    if len(data) > LIMIT_BYTES:
        raise MalformedMessage(f"too large: {len(data)} bytes, at most {LIMIT_BYTES} are read")
    try:
        fields: _Fields = _validate(data, strict=True)
    except ValidationError as invalid:
        raise MalformedMessage(_broken_rule(invalid.errors(include_url=False, include_input=False))) from None
    kind = fields["kind"]
    if kind != subject_kind:
        raise MalformedMessage(f"kind is not {subject_kind}, the kind of the consumer that delivered it")
    return WireMessage(fields["job_id"], kind, fields["dispatch"], fields["cleared"], fields["clear_reason"])


def _broken_rule(faults: list[ErrorDetails]) -> str:
    """Return one rule: a wrong version first, because it explains all other faults."""
    fields = [str(fault["loc"][0]) for fault in faults if fault["loc"]]
    if not fields:
        return "not JSON" if faults[0]["type"] == "json_invalid" else "not a JSON object"
    return _RULES["v"] if "v" in fields else _RULES[fields[0]]


class _Arrival:
    """A delivered message and how to answer it.

    Answers are sent without waiting: a lost one costs a redelivery, and the job's row then decides about it.
    ``answered``: a final answer was given, ``ack``, ``nak`` or ``term``; every further answer does nothing.
    """

    __slots__ = ("_reply", "_send", "_stored_ns", "answered", "data", "stream_seq", "subject")

    def __init__(  # noqa: PLR0917 -- called for every message
        self, subject: str, reply: bytes, data: bytes, stream_seq: int, stored_ns: int, send: SendVerdict
    ) -> None:
        self.subject = subject
        self.data = data
        self.stream_seq = stream_seq
        self.answered = False
        self._stored_ns = stored_ns
        self._reply = reply
        self._send = send

    @property
    def stored_at(self) -> datetime:
        """When the stream stored the message (UTC); a redelivery does not change it."""
        return datetime.fromtimestamp(self._stored_ns / 1e9, UTC)

    def ack(self) -> None:
        """Acknowledge the message: the stream removes it."""
        self._finish(b"+ACK")

    def nak(self, delay: float = 0.0) -> None:
        """Hand the message back: it is delivered again, to any puller, after ``delay`` seconds."""
        self._finish(b'-NAK {"delay":%d}' % round(delay * 1e9) if delay > 0 else b"-NAK")

    def term(self) -> None:
        """Reject a message that cannot be used: the stream removes it."""
        self._finish(b"+TERM")

    def in_progress(self) -> None:
        """Report that the work goes on: the consumer's ``ack_wait`` starts anew."""
        if not self.answered:
            self._send(self._reply, b"+WPI")

    def _finish(self, verdict: bytes) -> None:
        if not self.answered:
            self.answered = True
            self._send(self._reply, verdict)


class Delivery(_Arrival):
    """A message that names a job; ``num_delivered`` is the server's count of its deliveries, with this one.

    ``pending`` messages of its consumer were still undelivered when it was delivered.
    """

    __slots__ = ("dispatch", "job_id", "kind", "num_delivered", "pending")

    job_id: UUID
    kind: str
    dispatch: int
    num_delivered: int
    pending: int

    def __repr__(self) -> str:
        return f"<Delivery {self.stream_seq} of {self.kind} {self.job_id}:{self.dispatch}>"


class Undecodable(_Arrival):
    """A message that cannot be read; ``reason`` is the rule it breaks, never its content."""

    __slots__ = ("reason",)

    reason: str

    def __repr__(self) -> str:
        return f"<Undecodable {self.stream_seq} on {self.subject}: {self.reason}>"


def read(
    subject: str, reply: bytes, data: bytes, *, kind: str, send: SendVerdict
) -> Delivery | Undecodable | None:
    """Return the message that a consumer of ``kind`` delivered; None if JetStream did not send it."""
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<stored ns>.<pending>, in newer
    # replies with <domain>.<account> before <stream> and a random token at the end.
    tokens = reply.split(b".")
    first = 5 if len(tokens) == 9 else 7
    try:
        numbers = (tokens[first - 1], tokens[first], tokens[first + 2], tokens[first + 3])
        num_delivered, stream_seq, stored_ns, pending = map(int, numbers)
    except (ValueError, IndexError):
        return None
    if not (reply.startswith(b"$JS.ACK.") and 0 <= stream_seq <= _INT64 and 0 <= stored_ns <= _INT64):
        return None
    try:
        message = decode(data, subject_kind=kind)
    except MalformedMessage as fault:
        unread = Undecodable(subject, reply, data, stream_seq, stored_ns, send)
        unread.reason = str(fault)
        return unread
    delivery = Delivery(subject, reply, data, stream_seq, stored_ns, send)
    delivery.job_id, delivery.kind, delivery.dispatch = message.job_id, kind, message.dispatch
    delivery.num_delivered, delivery.pending = num_delivered, pending
    return delivery
