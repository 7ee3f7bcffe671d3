"""Errors of encrypted jobs, without their messages: a message may quote a payload or a result."""

from collections.abc import Iterator
from contextlib import suppress
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
from jsworker.core.tracebacks import frames_of, held_by, members_of, type_name

LEFT_OUT: Final = "its words are left out, for what jobs hold is encrypted"
_HOLD_NO_CONTENT: Final = (ContentRefused, DatabaseRefused, DatabaseUnavailable, KeyMissing, OwnershipLost)
"""Errors of jsworker whose messages name only jobs, keys and rules."""


def concealed_words(error: BaseException) -> str:
    """Return an error's message if it surely quotes no content, else its type without the message."""
    with suppress(BaseException):  # attributes of the user's classes are the user's code
        if type(error) in _HOLD_NO_CONTENT:
            return str(error)
        if isinstance(error, InvalidJson | InvalidPayload) and error.without_content:
            return f"{error.without_content}"
    return f"{type_name(error)}: {LEFT_OUT}"


def concealed(error: BaseException) -> str:
    """Return the concealed message and the tracebacks of an error and its causes, no values of variables."""
    return "\n".join([concealed_words(error), *_tracebacks(error)])


def _tracebacks(error: BaseException) -> Iterator[str]:
    """Yield the tracebacks of an error, its causes and the members of groups; there may be thousands."""
    seen: set[int] = set()
    groups = [error]
    while groups:
        chain: list[BaseException] = []
        link: BaseException | None = groups.pop()
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            chain.append(link)
            cause, context = held_by(link, "__cause__"), held_by(link, "__context__")
            link = context if cause is None and not held_by(link, "__suppress_context__") else cause
        for place, each in enumerate(reversed(chain)):
            if place:
                yield "\nThe above exception came before this one:\n"
            yield "Traceback (most recent call last):"
            yield frames_of(each) + type_name(each)
            groups += reversed(members_of(each))
