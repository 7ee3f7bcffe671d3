"""Errors of jobs that are encrypted, without their words: those may quote a payload or a result."""

import traceback
from collections.abc import Iterator
from typing import Final

from jsworker.core.errors import (
    ContentRefused,
    DatabaseRefused,
    DatabaseUnavailable,
    InvalidJson,
    InvalidPayload,
    KeyMissing,
    OwnershipLost,
)

LEFT_OUT: Final = "its words are left out, for what jobs hold is encrypted"
_HOLD_NO_CONTENT: Final = (ContentRefused, DatabaseRefused, DatabaseUnavailable, KeyMissing, OwnershipLost)
"""Errors of jsworker alone, whose words name jobs, keys and rules."""


def concealed_words(error: BaseException) -> str:
    """Return the type of an error, and its words only where they surely quote nothing."""
    name = type(error).__name__
    if type(error) in _HOLD_NO_CONTENT:
        return str(error)
    if isinstance(error, InvalidJson | InvalidPayload) and error.without_content:
        return error.without_content
    return f"{name}: {LEFT_OUT}"


def concealed(error: BaseException) -> str:
    """Return types and tracebacks of an error and of those behind it: files, lines and source, no values."""
    return "\n".join([concealed_words(error), *_tracebacks(error, set())])


def _tracebacks(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _tracebacks(before, seen)
        yield "\nThe above exception came before this one:\n"
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            if id(each) not in seen:
                yield from _tracebacks(each, seen)
