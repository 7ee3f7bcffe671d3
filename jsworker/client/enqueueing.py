"""What may be enqueued: kinds, payloads, keys and delays, checked before anything is written."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from jsworker.core import strict_json, tracing
from jsworker.core.errors import InvalidJson, InvalidName, InvalidPayload
from jsworker.core.names import check_kind, check_unique_key, shown
from jsworker.core.processor import JobProcessor, write_payload
from jsworker.core.pydantic_json import model_values
from jsworker.core.trace_context import TraceContext
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id

if TYPE_CHECKING:
    from sqlalchemy import TextClause

Kind = str | type[JobProcessor[Any]]
"""A kind's name, or its processor, whose payload type then checks the payload."""

MAX_PAYLOAD_BYTES = 1_048_576
"""The default limit of a payload's JSON text."""

_NO_SPAN = TraceContext()

MOST_ATTEMPTS = 1_000_000
MOST_STALLS = 100
"""The table's constraint refuses more from a producer, too."""

LONGEST_DELAY = 10 * 366 * 86400.0
"""Seconds; a later date is a mistake."""


class JobOptions(NamedTuple):
    """What is given once for all jobs of a call; see ``enqueue_statement``."""

    delay: float
    max_attempts: int | None
    max_stalls: int | None
    max_payload_bytes: int

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for what cannot be enqueued."""
        try:
            finite = math.isfinite(self.delay)
        except OverflowError:
            finite = False
        except TypeError:
            hint = "; give its total_seconds()" if isinstance(self.delay, timedelta) else ""
            what = f"not {type(self.delay).__name__}{hint}"
            raise TypeError(f"delay={shown(self.delay)} must be a number of seconds, {what}") from None
        if not (finite and 0 <= self.delay <= LONGEST_DELAY):
            raise ValueError(f"delay={shown(self.delay)} must be from 0 to {LONGEST_DELAY:g} seconds")
        for name, value, most in (
            ("max_attempts", self.max_attempts, MOST_ATTEMPTS),
            ("max_stalls", self.max_stalls, MOST_STALLS),
        ):
            if value is not None and not isinstance(value, Integral):
                raise TypeError(f"{name}={shown(value)} must be a whole number, not {type(value).__name__}")
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name}={shown(value)} must be from 1 to {most}")


def enqueue_statement(
    kind: Kind,
    payload: Any,
    *,
    unique_key: str | None = None,
    delay: float = 0.0,
    max_attempts: int | None = None,
    max_stalls: int | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> "TextClause":
    """Return a statement that enqueues a job in your own transaction, sync or async session alike.

    Execute it and read its one row ``(id, created, dispatch)``. ``created`` is False when a live job holds
    the unique key already; no row at all means that a twin is being committed this very moment: execute it
    again. The relay of any worker publishes the job after your commit; ``JobClient.publish_pending`` does
    so at once.

    Args:
        kind: the kind, or its processor, which checks the payload.
        payload: what the processor gets.
        unique_key: at most one live job of the kind has it; 1 to 255 printable characters.
        delay: seconds until the job is due.
        max_attempts: overrides the processor's; at most 1,000,000.
        max_stalls: overrides the processor's; at most 100. After two the job runs in quarantine.
        max_payload_bytes: most bytes of the payload's JSON text.

    Raises:
        InvalidName: the kind or the unique key holds characters that are not allowed, or too many.
        InvalidPayload: the payload does not fit the processor or is too large.
        InvalidJson: the payload is no JSON that can be stored.
        ValueError: delay, max_attempts or max_stalls is out of range.
        TypeError: one of them is no number.
    """
    options = JobOptions(delay, max_attempts, max_stalls, max_payload_bytes)
    [job] = new_jobs(kind, [payload], [unique_key], options, tracing.current())
    return enqueue.enqueue_statement(kind_name(kind), job, publish_after=0.0)


def kind_name(kind: Kind) -> str:
    """Return the name of a kind.

    Raises:
        InvalidName: it holds characters that are not allowed, or is no name at all.
    """
    if isinstance(kind, type) and issubclass(kind, JobProcessor):
        return check_kind(kind.kind)
    if not isinstance(kind, str):
        raise InvalidName(f"kind {shown(kind)} must be a kind's name, or the class of its processor")
    return check_kind(kind)


def one_for_each(name: str, given: Any) -> list[Any]:
    """Return what is given for many jobs as a list.

    Raises:
        TypeError: it is one value, or has no order.
    """
    if isinstance(given, str | bytes | Mapping | BaseModel | set | frozenset) or not isinstance(
        given, Iterable
    ):
        raise TypeError(f"{name} must be a list with one for each job, not {type(given).__name__}")
    return list(given)


def new_jobs(
    kind: Kind,
    payloads: Sequence[Any],
    unique_keys: Sequence[str | None],
    options: JobOptions,
    context: TraceContext = _NO_SPAN,
) -> Iterator[NewJob]:
    """Return a job with a fresh id for each payload; all are checked before the first one is made.

    See ``enqueue_statement`` for the errors; one of several payloads is named by its index. The span of
    ``context`` is the parent of the jobs' own.
    """
    kind_name(kind)
    options.check()
    keys = [check_unique_key(key) if key is not None else None for key in unique_keys]
    texts: list[str] = []
    for payload in payloads:
        try:
            texts.append(_payload_text(kind, payload, options.max_payload_bytes))
        except (InvalidJson, InvalidPayload) as error:
            if len(payloads) == 1:
                raise
            raise type(error)(f"payloads[{len(texts)}]: {error}") from None
    rest = (float(options.delay), options.max_attempts, options.max_stalls, *context)
    return (NewJob(new_job_id(), text, key, *rest) for text, key in zip(texts, keys, strict=True))


def _payload_text(kind: Kind, payload: Any, most: int) -> str:
    if isinstance(kind, str):
        text = strict_json.dumps(model_values(payload, what="payload"), what="payload")
    else:
        text = write_payload(kind, payload)
    size = len(text) if text.isascii() else len(text.encode())
    if size > most:
        raise InvalidPayload(f"payload of {size} bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES={most}")
    return text
