"""The message on the wire: it names a job and says which dispatch of it; the payload stays in the row."""

import re
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json
from typing_extensions import TypedDict

from jsworker.core.errors import JsworkerError

VERSION: Final = 1
"""The version this module writes, and the only one it reads."""

LIMIT_BYTES: Final = 65_536
"""Largest message that a stream takes and a worker reads."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9-]+")
_HEADER_VALUE: Final = re.compile(r"[^\r\n\0]*")
_REASON_CHARACTERS: Final = 1_000
_HIGHEST_DISPATCH: Final = 2**63 - 1


class MalformedMessage(JsworkerError):
    """A message cannot be read. The text names the rule that it breaks and never shows its content."""


class WireMessage(NamedTuple):
    """A hint that a job wants to be looked at.

    Attributes:
        job_id: the job.
        kind: the job's kind.
        dispatch: which entry into the queue this message belongs to; counts from 1.
        cleared: the job was taken back from a former owner. For logs: the row's own field is the true one.
        clear_reason: why it was taken back.
    """

    job_id: UUID
    kind: str
    dispatch: int
    cleared: bool = False
    clear_reason: str | None = None


class _Fields(TypedDict):
    v: Annotated[int, Field(ge=VERSION, le=VERSION)]
    job_id: UUID
    kind: str
    dispatch: Annotated[int, Field(ge=1, le=_HIGHEST_DISPATCH)]
    cleared: bool
    clear_reason: str | None


_RULES: Final = {
    "v": f"wrong version: v must be {VERSION}",
    "job_id": "job_id must be a UUID",
    "kind": "kind must be a text",
    "dispatch": f"dispatch must be an integer from 1 to {_HIGHEST_DISPATCH}",
    "cleared": "cleared must be true or false",
    "clear_reason": "clear_reason must be a text or null",
}

_validate = TypeAdapter(_Fields).validator.validate_json


def subject_of(prefix: str, kind: str) -> str:
    """Return the subject on which messages of a kind travel."""
    return f"{prefix}.{kind}"


def message_id(job_id: UUID, dispatch: int) -> str:
    """Return the ``Nats-Msg-Id``: a new dispatch is a new message to JetStream's duplicate window."""
    return f"{job_id}:{dispatch}"


def header_block(message: WireMessage, extra: Mapping[str, str] | None) -> bytes:
    """Return the message's headers as NATS sends them.

    Raises:
        ValueError: a further header is not one line of text with a plain name.
    """
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


def decode(data: bytes, *, subject_kind: str, limit_bytes: int = LIMIT_BYTES) -> WireMessage:
    """Read a message.

    Args:
        data: what was delivered.
        subject_kind: the kind of the consumer that delivered it.
        limit_bytes: nothing longer is looked at.

    Raises:
        MalformedMessage: it is too large, no JSON object, of another version, of another kind than the
            consumer's, or a field breaks its rule. Fields that version 1 does not know are ignored.
    """
    if len(data) > limit_bytes:
        raise MalformedMessage(f"too large: {len(data)} bytes, at most {limit_bytes} are read")
    try:
        fields: _Fields = _validate(data, strict=True)
    except ValidationError as invalid:
        raise MalformedMessage(_broken_rule(invalid.errors(include_url=False, include_input=False))) from None
    kind = fields["kind"]
    if kind != subject_kind:
        raise MalformedMessage(f"kind is not {subject_kind}, the kind of the consumer that delivered it")
    return WireMessage(fields["job_id"], kind, fields["dispatch"], fields["cleared"], fields["clear_reason"])


def _broken_rule(faults: list[ErrorDetails]) -> str:
    """Name one rule: a wrong version first, for it explains whatever else is missing."""
    fields = [str(fault["loc"][0]) for fault in faults if fault["loc"]]
    if not fields:
        return "not JSON" if faults[0]["type"] == "json_invalid" else "not a JSON object"
    return _RULES["v"] if "v" in fields else _RULES[fields[0]]
