"""Assertions about waiting jobs."""

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from jsworker.client.enqueueing import Kind, kind_name
from jsworker.core import strict_json
from jsworker.core.contents import Contents, owner_of_payload
from jsworker.core.names import shown
from jsworker.core.priorities import PRIORITIES, Priority, priority_number
from jsworker.core.processor import Seconds, write_payload
from jsworker.core.settings import Settings
from jsworker.ownership import for_tests
from jsworker.ownership.pool import Row
from jsworker.testing.shared_servers import database_at, settings_in_use

_SHOWN: Final = 10
_LONGEST_PAYLOAD: Final = 500


class _Wanted(NamedTuple):
    """The properties that a job must have; None: any value."""

    kind: str
    payload: Any
    has_payload: bool
    is_whole: bool
    priority: Priority | None
    unique_key: str | None
    due_after: float | None
    due_within: float | None

    def fits(self, row: Row) -> bool:
        seconds = row.seconds or 0.0
        return (
            (not self.has_payload or _fits(self.payload, row.payload, is_whole=self.is_whole))
            and (self.priority is None or row.priority == priority_number(self.priority))
            and (self.unique_key is None or row.unique_key == self.unique_key)
            and (self.due_after is None or seconds >= self.due_after)
            and (self.due_within is None or (seconds <= self.due_within and row.held_by is None))
        )

    def __str__(self) -> str:
        words = [f"of kind {self.kind}"]
        if self.has_payload:
            words.append(f"with payload {_line(self.payload)}")
        if self.priority is not None:
            words.append(f"of {self.priority} priority")
        if self.unique_key is not None:
            words.append(f"with unique key {shown(self.unique_key)}")
        if self.due_after is not None:
            words.append(f"due in {self.due_after:g} s or later")
        if self.due_within is not None:
            words.append(f"due within {self.due_within:g} s")
        return " ".join(words)


_ANYTHING: Final = object()


async def assert_enqueued(
    kind: Kind,
    payload: Any = _ANYTHING,
    *,
    count: int | None = None,
    priority: Priority | None = None,
    unique_key: str | None = None,
    due_after: Seconds | None = None,
    due_within: Seconds | None = None,
    settings: Settings | None = None,
) -> None:
    """Raise AssertionError unless such jobs of this kind wait; the message lists the waiting jobs.

    A job waits until it is claimed: a running or ended one is not counted.

    Args:
        kind: a kind's name, or its processor.
        payload: a dict may leave fields out, in nested dicts too; all other values must be equal. A model is
            compared with all of its fields. Left out: any payload.
        count: how many such jobs; None: at least one.
        priority: high, normal or low.
        unique_key: their unique key.
        due_after: seconds, or a timedelta, from now: the jobs are due at that time or later.
        due_within: seconds, or a timedelta, from now: the jobs are due by then, and not held.
        settings: where the jobs are, and the keys of encrypted jobs; None: the settings of the test that
            runs.

    Raises:
        KeyMissing, ContentRefused: the payload of a job that waits cannot be decoded.
        RuntimeError: more than 100,000 jobs of the kind wait.
    """
    __tracebackhide__ = True
    wanted = _wanted(kind, payload, priority, unique_key, due=(due_after, due_within))
    found, text = await _look(wanted, settings, "assert_enqueued")
    if found == count or (count is None and found):
        return
    expected = "a job" if count is None else f"{count} job{'' if count == 1 else 's'}"
    raise AssertionError(f"expected {expected} {wanted}, found {found}\n{text}")


async def assert_not_enqueued(
    kind: Kind,
    payload: Any = _ANYTHING,
    *,
    priority: Priority | None = None,
    unique_key: str | None = None,
    due_after: Seconds | None = None,
    due_within: Seconds | None = None,
    settings: Settings | None = None,
) -> None:
    """Raise AssertionError if such a job waits.

    See ``assert_enqueued`` for the arguments.

    Raises:
        KeyMissing, ContentRefused: the payload of a job that waits cannot be decoded.
        RuntimeError: more than 100,000 jobs of the kind wait.
    """
    __tracebackhide__ = True
    wanted = _wanted(kind, payload, priority, unique_key, due=(due_after, due_within))
    found, text = await _look(wanted, settings, "assert_not_enqueued")
    if found:
        raise AssertionError(f"expected no job {wanted}, found {found}\n{text}")


def _wanted(
    kind: Kind,
    payload: Any,
    priority: Priority | None,
    unique_key: str | None,
    *,
    due: tuple[Seconds | None, Seconds | None],
) -> _Wanted:
    if priority is not None:
        priority_number(priority)
    has_payload = payload is not _ANYTHING
    value = _json_value(kind, payload) if has_payload else None
    is_whole = not isinstance(payload, Mapping)
    return _Wanted(kind_name(kind), value, has_payload, is_whole, priority, unique_key, *map(_seconds, due))


def _json_value(kind: Kind, payload: Any) -> Any:
    """Return a payload as it would be stored; a dict is not checked, because it may leave fields out."""
    if isinstance(kind, str) or isinstance(payload, Mapping):
        return strict_json.loads(strict_json.dumps_model(payload, what="payload"))
    return strict_json.loads(write_payload(kind, payload))


def _seconds(given: Seconds | None) -> float | None:
    return given.total_seconds() if isinstance(given, timedelta) else given


async def _look(wanted: _Wanted, settings: Settings | None, what: str) -> tuple[int, str]:
    """Return how many such jobs wait, and the text about those of the kind that a failed assertion shows."""
    own = settings_in_use(settings, what)
    async with database_at(own) as database:
        waiting = await for_tests.waiting_jobs(database, wanted.kind)
        besides = await for_tests.count_running_and_ended(database, wanted.kind)
        others = await for_tests.count_waiting_of_other_kinds(database, wanted.kind)
    if len(waiting) > for_tests.MOST_WAITING:
        raise RuntimeError(
            f"{what}: more than {for_tests.MOST_WAITING:,} jobs of kind {wanted.kind} wait, too many to read"
        )
    contents = Contents.of(own)
    if wanted.has_payload or contents.codec is not None:
        waiting = [_decoded(row, contents, wanted.kind) for row in waiting]
    found = sum(map(wanted.fits, waiting))
    lines = _listed(waiting, besides, wanted.kind)
    if others and not waiting:
        lines.append("of other kinds wait: " + ", ".join(f"{n} {kind}" for kind, n in others.items()))
    if wanted.has_payload and waiting and not found:
        lines += _difference(wanted, waiting)
    return found, "\n".join(lines)


def _decoded(row: Row, contents: Contents, kind: str) -> Row:
    owner = owner_of_payload(row.id, row.waiting_key, is_scheduled=row.scheduled_for is not None)
    return row._replace(payload=contents.decode_value(row.payload, "payload", kind, owner))


def _listed(waiting: Sequence[Row], besides: Mapping[str, int], kind: str) -> list[str]:
    counted = ", ".join(f"{jobs} {status}" for status, jobs in besides.items())
    others = f" (besides: {counted})" if counted else ""
    lines = [f"{len(waiting)} of kind {kind} wait{others}{':' if waiting else ''}"]
    lines += [f"  {_in_words(row)}" for row in waiting[:_SHOWN]]
    if len(waiting) > _SHOWN:
        lines.append(f"  and {len(waiting) - _SHOWN} more")
    return lines


def _in_words(row: Row) -> str:
    words = [f"{row.id} {row.status}"]
    if row.held_by is not None:
        words.append(f"held by {row.held_by}")
    if row.seconds is not None and row.status == "scheduled":
        words.append(f"due in {row.seconds:.0f} s")
    if row.priority != priority_number("normal"):
        words.append(PRIORITIES[row.priority])
    if row.unique_key is not None:
        words.append(f"unique key {shown(row.unique_key)}")
    return f"{', '.join(words)}: {_line(row.payload)}"


def _difference(wanted: _Wanted, waiting: Sequence[Row]) -> list[str]:
    """Return the difference between the wanted payload and the most similar one."""
    expected = _pretty(wanted.payload)

    def asked_about(row: Row) -> str:
        return _pretty(row.payload if wanted.is_whole else _shared(wanted.payload, row.payload))

    def likeness(row: Row) -> float:
        return difflib.SequenceMatcher(None, expected, asked_about(row)).ratio()

    nearest = max(waiting[:100], key=likeness)
    actual = asked_about(nearest)
    if actual == expected:
        return []
    compared = difflib.ndiff(expected.splitlines(), actual.splitlines())
    title = f"the nearest one, {nearest.id}, differs (- expected, + enqueued):"
    return [title, *(f"  {line}" for line in compared if not line.startswith("?"))]


def _shared(wanted: Any, actual: Any) -> Any:
    """Return the part of a payload that the wanted payload also has."""
    if isinstance(wanted, dict) and isinstance(actual, dict):
        return {name: _shared(value, actual[name]) for name, value in wanted.items() if name in actual}
    return actual


def _fits(wanted: Any, actual: Any, *, is_whole: bool) -> bool:
    """Return whether a value is the wanted one; unless ``is_whole``, dicts outside of lists may have more."""
    if isinstance(wanted, dict) and isinstance(actual, dict):
        return not (is_whole and len(wanted) < len(actual)) and all(
            name in actual and _fits(value, actual[name], is_whole=is_whole) for name, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(actual, list):
        return len(wanted) == len(actual) and all(
            _fits(one, other, is_whole=True) for one, other in zip(wanted, actual, strict=True)
        )
    # True does not equal 1 here, but 1.0 does: JSON does not tell these numbers apart.
    return isinstance(wanted, bool) is isinstance(actual, bool) and bool(wanted == actual)


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str)


def _line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_PAYLOAD else f"{text[:_LONGEST_PAYLOAD]}…"
