"""The outcomes of runs as values, and how an exception becomes one."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jsworker.core.clock import LONGEST_WAIT
from jsworker.core.errors import ContentRefused, Fail, InvalidJson, InvalidPayload, KeyMissing, Retry, Snooze
from jsworker.core.names import storable
from jsworker.core.processor import Backoff
from jsworker.core.strict_json import write_result
from jsworker.core.tracebacks import held_by, members_of, message_of, traceback_of, type_name
from jsworker.ownership.refusals import is_cause_of
from jsworker.worker.pipeline.concealment import concealed, concealed_words
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.run_writes import LeaseServices
from jsworker.worker.pipeline.threads import ThreadNotStarted

_ERROR_CHARACTERS = 8000
_HEADLINE_CHARACTERS = 500

_ROW_BEGINS = ("DETAIL:", "CONTEXT:", "QUERY:", "LINE ", "[SQL:", "[parameters:")
"""Beginnings of lines of a database error that repeat rows, and so payloads; values may have line breaks."""
_ROW_ENDS = ("HINT:", "(Background on", "The above exception", "During handling of", "Traceback (", "+-")
_GROUP_MARGIN = " |"


class InvalidResult(InvalidJson):
    """A result cannot be stored; another attempt would fail likewise."""


class Asleep(Snooze):
    """A run ends because its job sleeps; this is not counted as a snooze."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The processor returned a result, as JSON text."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ended in an error."""

    error: str
    permanent: str | None  # why no further attempt may follow: permanent, payload or result
    delay: float  # seconds until the next attempt; not used after a stall
    stalled: bool = False  # the run's process died: a stall is counted instead of an error
    pauses_key: bool = False  # no other job of its limit key may begin for ``delay`` seconds


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The run was stopped before it had an outcome."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A fault that is not the job's, such as a server's, ended the run; an error only if it lasts long."""

    error: str
    reason: str  # for the timeline and the next run
    delay: float  # as in Failed, if it is counted as an error
    missing_key: str | None = None  # a decryption key: the job waits for it, and it is never an error


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The job wants to run again later."""

    reason: str  # for the timeline
    after: float  # seconds until the next run
    counted: bool  # whether it counts as a snooze


@dataclass(frozen=True, slots=True)
class Lost:
    """Another worker owns the job; there is nothing to write."""


Outcome = Completed | Failed | HandedBack | Interrupted | Snoozed | Lost

_COMPLETED = Completed(None)


def returned(run: Run, value: Any, services: LeaseServices) -> Outcome:
    """Return the outcome of a run whose processor returned ``value``."""
    if value is None:
        return _COMPLETED
    try:
        return Completed(result_text(run, value, services))
    except InvalidResult as error:
        return Failed(_words(run, error), "result", 0.0)


def result_text(run: Run, value: Any, services: LeaseServices) -> str | None:
    """Return a result as JSON text, as it is stored; None if there is none. Raises InvalidResult."""
    if value is None:
        return None
    try:
        text = write_result(value, run.kind.result_type)
        text = services.contents.encode(text, "result", run.kind.name, run.id)
        check_size(text, "result", services.settings.max_result_bytes)
    except InvalidJson as error:
        refused = InvalidResult(str(error))
        refused.without_content = error.without_content
        raise refused from None
    return text


def check_size(text: str, what: str, max_bytes: int) -> None:
    """Raise InvalidJson when a result or a checkpoint is longer than its setting allows."""
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        error = InvalidJson(f"{what} of {size} bytes exceeds JSWORKER_MAX_{what.upper()}_BYTES={max_bytes}")
        error.without_content = str(error)
        raise error


@contextmanager
def reading_own_content() -> Iterator[None]:
    """Mark the errors that decide about a run: a processor may also read contents of other jobs."""
    try:
        yield
    except (ContentRefused, KeyMissing) as error:
        error.of_run = True
        raise


def raised(run: Run, error: BaseException) -> Outcome:
    """Return the outcome of a run whose processor raised."""
    try:
        return _of_raised(run, error)
    except BaseException as fault:  # noqa: BLE001 -- attributes of the user's classes are the user's code
        why = f"reading what the error asks for raised {type_name(fault)}"
    try:
        return failed(run, f"{why}; {_described(run, error)}")
    except BaseException:  # noqa: BLE001 -- the worker would end, and other jobs with it
        return failed(run, f"{why}; {type_name(error)}: it cannot be shown")


def _of_raised(run: Run, error: BaseException) -> Outcome:
    error = _decisive(run, error)
    if isinstance(error, Snooze) and not passed_limit(run):
        return Snoozed(
            first_line(_words(run, error)), _delay(run, error.after), not isinstance(error, Asleep)
        )
    if isinstance(error, KeyMissing) and error.of_run:
        return Interrupted(str(error), str(error), _delay(run), error.what)
    if isinstance(error, ThreadNotStarted):
        return Interrupted(str(error), str(error), _delay(run))
    return _of_error(run, error)


def raised_in(error: BaseException) -> Iterator[BaseException]:
    """Yield each error in a group, as that of a TaskGroup, and in groups in it; else the error itself."""
    left = [error]
    seen: set[int] = set()  # a group may hold another one many times
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if members := members_of(each):
            left += reversed(members)
        else:
            yield each


def missing_thread(error: BaseException) -> ThreadNotStarted | None:
    """Return the error, or one in a group, that says that the system starts no thread; else None."""
    return next((each for each in raised_in(error) if type(each) is ThreadNotStarted), None)


def _decisive(run: Run, error: BaseException) -> BaseException:
    """Return the error that counts of a group in which each has a rule of its own; else the group itself."""
    decisive = Fail | ThreadNotStarted | Retry | Snooze
    asked = [
        each
        for each in raised_in(error)
        if isinstance(each, decisive) or (isinstance(each, ContentRefused | KeyMissing) and each.of_run)
    ]
    if not asked or len(asked) < sum(1 for _ in raised_in(error)):
        return error

    def weight(each: BaseException) -> tuple[int, float]:
        match each:
            case Snooze():
                return 0, _delay(run, each.after)
            case Retry():
                return 1, _delay(run, each.after)
            case KeyMissing() | ThreadNotStarted():
                return 2, 0.0
            case _:
                return 3, 0.0

    return max(asked, key=weight)


def _of_error(run: Run, error: BaseException) -> Outcome:
    if final := _final(run, error):
        return Failed(_words(run, error), final, 0.0)
    match error:
        case Retry() if run.is_handed_back and not error.after:
            return _handed_back(run)
        case Retry():
            why, pauses = _after_limit(run, _words(run, error)), error.pause is not None
            return Failed(why, None, _delay(run, error.after), pauses_key=pauses)
        case _ if run.stop in {StopReason.FENCED, StopReason.SHUTDOWN}:
            return _handed_back(run)  # its cancellation became another error, which is not the job's fault
        case _ if run.stop is None and run.interrupted is not None and is_cause_of(run.interrupted[0], error):
            reason = f"PostgreSQL failed in the job's own transaction: {run.interrupted[1]}"
            return Interrupted(_described(run, error), reason, _delay(run))
        case _:
            return failed(run, _after_limit(run, _described(run, error)))


def failed(run: Run, error: str) -> Failed:
    """Return the outcome of an attempt that failed; others may follow after the back-off."""
    return Failed(error, None, _delay(run))


def stopped(run: Run) -> Outcome:
    """Return the outcome of a run that was cancelled in the middle of its work."""
    match run.stop:
        case StopReason.LOST:
            return Lost()
        case StopReason.CANCELLED:
            return HandedBack("cancelled on request")  # a job that was asked to stop has not failed
        case StopReason.TIMEOUT | StopReason.NO_PROGRESS:
            return failed(run, passed_limit(run))
        case StopReason.FENCED | StopReason.SHUTDOWN | None:
            return _handed_back(run)


def timed_out(run: Run, raised: BaseException) -> BaseException:
    """Return TimeoutError in place of the cancellation for a passed time limit; else the error itself."""
    limit = passed_limit(run)
    if not (limit and issubclass(type(raised), asyncio.CancelledError)):
        return raised
    error = TimeoutError(limit).with_traceback(held_by(raised, "__traceback__"))  # the place where it waited
    error.__cause__ = raised
    return error


def ignored_its_stop(run: Run) -> Outcome:
    """Return the outcome of a run that goes on although it was stopped."""
    match stopped(run):
        case Failed(why) | HandedBack(why):
            return failed(run, f"{why}; it goes on although it was cancelled {run.cancellations} times")
        case outcome:
            return outcome


def cancelled_itself(run: Run, error: BaseException) -> Outcome:
    """Return the outcome of a run that was cancelled, but neither by the worker nor on request."""
    why = "cancelled, but not by jsworker: by the processor itself or by something that it uses"
    if run.kind.conceals:
        return failed(run, clean(f"{why}\n{concealed(error)}"))
    return failed(run, clean(f"{headline(error)}: {why}\n{traceback_of(error)}"))


def _final(run: Run, error: BaseException) -> str:
    """Return why no further attempt may follow; empty if one may."""
    match error:
        case Fail():
            return "permanent"
        case InvalidResult():
            return "result"
        case ContentRefused(of_run=True):
            return "payload"
        case InvalidPayload() | InvalidJson() if run.job is None:
            return "payload"
        case _:
            return ""


def passed_limit(run: Run) -> str:
    """Return in words which time limit of a run has passed; empty if none has."""
    if run.stop is StopReason.TIMEOUT:
        return f"timed out after {run.kind.limits.timeout:g} s"
    return f"no progress for {run.kind.progress_timeout:g} s" if run.stop is StopReason.NO_PROGRESS else ""


def _after_limit(run: Run, error: str) -> str:
    """Put a passed time limit before the error, which may only be a consequence of the cancellation."""
    limit = passed_limit(run)
    return f"{limit}; {error}" if limit else error


def _handed_back(run: Run) -> HandedBack:
    if run.stop is StopReason.FENCED:
        return HandedBack("the owner could not renew its heartbeat in time and stopped the run")
    return HandedBack("the worker was stopped")


def _delay(run: Run, wanted: Any = None) -> float:
    """Return the seconds until the next attempt: the wanted ones or the back-off, the first valid number."""
    attempt = run.claimed.attempt
    for choose in (
        lambda: wanted,
        lambda: run.kind.processor.backoff.delay(attempt),
        lambda: Backoff().delay(attempt),
    ):
        try:
            seconds = float(choose())
        except BaseException:  # noqa: BLE001, S112 -- the user's code; the attempt has failed anyway
            continue
        if not math.isnan(seconds):
            return min(max(seconds, 0.0), LONGEST_WAIT)
    raise AssertionError


def _words(run: Run, error: BaseException) -> str:
    """Return the text of an error as it may be stored and shown."""
    return clean(concealed_words(error) if run.kind.conceals else message_of(error))


def shown_headline(run: Run, error: BaseException) -> str:
    """Return type and first line of an error's message as they may be stored and shown."""
    return concealed_words(error) if run.kind.conceals else headline(error)


def _described(run: Run, error: BaseException) -> str:
    return clean(concealed(error)) if run.kind.conceals else describe(error)


def headline(error: BaseException) -> str:
    """Return type and first line of an error's message."""
    first = first_line(clean(message_of(error)))
    return f"{type_name(error)}: {first}" if first else type_name(error)


def first_line(text: str) -> str:
    """Return the first line of an error's text, cut to what an event may carry."""
    return text.split("\n", 1)[0][:_HEADLINE_CHARACTERS]


def describe(error: BaseException) -> str:
    """Return type, message and traceback of an error as text that may be stored and shown."""
    return clean(f"{headline(error)}\n{traceback_of(error)}")


def clean(text: str) -> str:
    """Return text without the rows of a database error, NUL and lone surrogates; cut a long one."""
    kept = storable("\n".join(_without_rows(text)))
    if len(kept) <= _ERROR_CHARACTERS:
        return kept
    half = _ERROR_CHARACTERS // 2
    return f"{kept[:half]}\n… {len(kept) - 2 * half} characters left out …\n{kept[-half:]}"


def _without_rows(text: str) -> Iterator[str]:
    in_row = False
    for line in text.splitlines():
        words = line.lstrip(_GROUP_MARGIN)
        if words.startswith(_ROW_BEGINS):
            in_row = True
        elif words.startswith(_ROW_ENDS):
            in_row = False
        if not in_row:
            yield line
