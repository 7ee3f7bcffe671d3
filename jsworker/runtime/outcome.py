"""What a run ended in, as a value, and how an exception becomes one."""

import traceback
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jsworker import strict_json
from jsworker.errors import Fail, InvalidJson, InvalidPayload, OwnershipLost, Retry
from jsworker.runtime.run import Run, Stop

_ERROR_CHARACTERS = 8000
_ROW_DETAILS = ("DETAIL:", "[SQL:", "[parameters:", "CONTEXT:")
"""Lines of a database error that repeat whole rows, and with them payloads."""


@dataclass(frozen=True, slots=True)
class Completed:
    """It returned. ``result`` is JSON text."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """It ended in an error.

    Attributes:
        error: what happened, with the traceback.
        permanent: why no attempt may follow: ``permanent``, ``payload`` or ``result``; None: one may.
        delay: seconds until the next attempt, if there is one.
    """

    error: str
    permanent: str | None
    delay: float


@dataclass(frozen=True, slots=True)
class HandedBack:
    """It was stopped before it had an outcome."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Somebody else owns the job; there is nothing to say about it."""


Outcome = Completed | Failed | HandedBack | Lost


def returned(run: Run, value: Any, max_bytes: int) -> Outcome:
    """Return the outcome of a run whose processor returned ``value``."""
    if run.stop is Stop.LOST:
        return Lost()
    try:
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        text = None if plain is None else strict_json.dumps(plain, what="result")
    except InvalidJson as error:
        return Failed(str(error), "result", 0.0)
    if text is not None and len(text.encode()) > max_bytes:
        return Failed(f"result of {len(text.encode())} bytes exceeds {max_bytes} bytes", "result", 0.0)
    return Completed(text)


def raised(run: Run, error: BaseException) -> Outcome:
    """Return the outcome of a run whose processor raised."""
    backoff = run.kind.processor.backoff.delay(run.claimed.attempt)
    match error:
        case OwnershipLost():
            return Lost()
        case Retry():
            return Failed(clean(str(error)), None, backoff if error.after is None else max(error.after, 0.0))
        case Fail():
            return Failed(clean(str(error)), "permanent", 0.0)
        case InvalidPayload() | InvalidJson() if run.unread:
            return Failed(clean(str(error)), "payload", 0.0)
        case _:
            return Failed(describe(error), None, backoff)


def stopped(run: Run) -> Outcome:
    """Return the outcome of a run that was cancelled in the middle of its work."""
    backoff = run.kind.processor.backoff.delay(run.claimed.attempt)
    match run.stop:
        case Stop.LOST:
            return Lost()
        case Stop.CANCELLED:
            return Failed("cancelled on request", None, 0.0)
        case Stop.TIMEOUT:
            return Failed(f"timed out after {run.kind.timeout:g} s", None, backoff)
        case Stop.NO_PROGRESS:
            return Failed(f"no progress for {run.kind.progress_timeout:g} s", None, backoff)
        case Stop.FENCED:
            return HandedBack("the owner could not renew its heartbeat in time and stopped the run")
        case Stop.SHUTDOWN | None:
            return HandedBack("the worker was stopped")


def headline(error: BaseException) -> str:
    """Return type and first line of an error's message."""
    first = clean(str(error)).split("\n", 1)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def describe(error: BaseException) -> str:
    """Return type, message and traceback of an error as text that may be stored and shown."""
    lines = traceback.format_exception(error)
    return clean(f"{headline(error)}\n{''.join(lines)}")


def clean(text: str) -> str:
    """Return text without rows of a database error, NUL and lone surrogates, cut in its middle."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(_ROW_DETAILS)]
    kept = "\n".join(lines).replace("\0", "\\0").encode(errors="backslashreplace").decode()
    if len(kept) <= _ERROR_CHARACTERS:
        return kept
    half = _ERROR_CHARACTERS // 2
    return f"{kept[:half]}\n… {len(kept) - 2 * half} characters left out …\n{kept[-half:]}"
