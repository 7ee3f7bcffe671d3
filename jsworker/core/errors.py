"""Every error that jsworker raises on purpose, and the three that a processor raises on purpose.

The first paragraph of a class docstring is the default message; a more exact one is given where the error is
raised.
"""

import inspect
from datetime import timedelta
from typing import Any, ClassVar, Literal
from uuid import UUID

from jsworker.core.clock import wait_in_seconds


class JsworkerError(Exception):
    """jsworker could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        meaning = inspect.getdoc(type(self)) or type(self).__name__
        super().__init__(message or meaning.partition("\n\n")[0])


class UsageError(JsworkerError):
    """Something was called in a way that makes no sense; commands end with exit code 2."""


class SettingsError(UsageError):
    """A setting is wrong or missing."""

    @property
    def lines(self) -> list[str]:
        """The faults, one line each."""
        return str(self).split("\n")


class InvalidName(UsageError, ValueError):
    """A kind, unique key, step or schedule has a name that is not allowed."""


class InvalidJson(UsageError, ValueError):
    """A value cannot be stored as JSON.

    Attributes:
        without_content: the same without names of fields, for jobs that are encrypted; empty: left out.
    """

    without_content: str = ""


class InvalidPayload(UsageError, ValueError):
    """A payload does not fit the processor's model or the size limit; attributes as ``InvalidJson``."""

    without_content: str = ""


class InvalidStep(UsageError, ValueError):
    """A step of a job cannot be used like this."""


class InvalidTarget(UsageError):
    """A processor target cannot be imported or is no JobProcessor."""


class DatabaseUnavailable(JsworkerError):
    """PostgreSQL did not answer."""


class DatabaseBusy(DatabaseUnavailable):
    """PostgreSQL answered, and takes no further connection or cannot execute a statement for now."""


class DatabaseFailing(DatabaseBusy):
    """PostgreSQL has no disk space, memory or transaction id for a statement, or cannot read or write a file.

    Attributes:
        sqlstate: PostgreSQL's five-character code.
    """

    sqlstate: str = ""


class TooManyConnections(DatabaseBusy):
    """The server, a pooler before it, the database or the role has no connection left."""


class TooManyFiles(DatabaseBusy):
    """PostgreSQL was not asked, because this process may open no further file or socket."""


class DatabaseTimeout(DatabaseUnavailable):
    """PostgreSQL did not answer a statement in time: it is silent, or others hold a lock."""


class DatabaseRefused(JsworkerError):
    """PostgreSQL refused the login or the statement.

    Attributes:
        sqlstate: PostgreSQL's five-character code, None for a refused login.
        role: which of jsworker's roles has the right that is missing, None where this is not known.
    """

    sqlstate: str | None = None
    role: str | None = None


class LockTimeout(DatabaseRefused):
    """A statement waited for a lock for longer than PostgreSQL's ``lock_timeout`` allows."""

    sqlstate = "55P03"


def may_answer_later(error: BaseException) -> bool:
    """Return whether a later call may succeed: PostgreSQL is away, or refused a login or a lock for now."""
    return isinstance(error, DatabaseUnavailable | LockTimeout) or (
        isinstance(error, DatabaseRefused) and error.sqlstate is None
    )


class MigrationMissing(JsworkerError):
    """The database has no jsworker schema of this version: run `jsworker db upgrade`."""

    command: ClassVar[str] = "jsworker db upgrade"
    """The command that upgrades it; in a project of Django, `manage.py migrate`."""


class StreamUnavailable(JsworkerError):
    """NATS did not answer."""


class StreamRefused(JsworkerError):
    """The NATS server, the stream or a consumer cannot be used as configured."""


class PublishFailed(JsworkerError):
    """A message was not acknowledged by JetStream; it may be stored or not."""


class PublishRefused(PublishFailed):
    """JetStream answered that it does not store a message."""


class MessageUnfit(PublishFailed):
    """A message cannot be published as it is; nothing was sent."""


class KeyMissing(JsworkerError):
    """A content is encoded with a key that is not here.

    Attributes:
        what: the key and its codec, in words.
        of_run: whether a run raised it as it read its own job, which then waits for the key.
    """

    what: str = ""
    of_run: bool = False

    @classmethod
    def of(cls, where: str, what: str) -> "KeyMissing":
        """Return the error for a content at ``where`` that is encoded with the key ``what``."""
        error = cls(f"{where}: is encoded with {what}, which is not here: see JSWORKER_ENCRYPTION_KEYS")
        error.what = what
        return error


class ContentRefused(JsworkerError):
    """An encoded content was changed, or belongs to another job, kind or column.

    Attributes:
        of_run: whether a run raised it as it read its own job, which then fails for good.
    """

    of_run: bool = False


class OwnershipLost(JsworkerError):
    """This run no longer owns its job."""


class JobNotFound(JsworkerError):
    """No job has this id."""


class JobNotCompleted(JsworkerError):
    """There is no result to return, for the job has not completed.

    Attributes:
        job_id: the job's id.
        error: the text of its last error, None: it had none.
        reason: why it has failed for good, for example ``attempts``, ``permanent`` or ``stalled``.
    """

    job_id: UUID | None = None
    error: str | None = None
    reason: str | None = None


class JobFailed(JobNotCompleted):
    """The job has failed for good."""


class JobCancelled(JobNotCompleted):
    """The job was cancelled."""


class JobGone(JobNotCompleted):
    """No job has this id: it was pruned after its end, there never was one, or it is not committed."""


class TransitionRefused(JsworkerError):
    """The job's state does not allow this."""


class WorkflowNotFound(JsworkerError):
    """No workflow has this id."""


class WorkflowFailed(JsworkerError):
    """A workflow has no result: a job of its last node has failed, was cancelled, or was pruned."""


class ServersUnavailable(JsworkerError):
    """The embedded servers could not be started."""


def _without_init(error: Exception) -> tuple[Any, ...]:
    """Pickle or copy an error without ``__init__``: Exception would call it with the reason as ``after``."""
    return Exception.__new__, (type(error), *error.args), vars(error)


class Retry(Exception):
    """Raised by a processor: this attempt failed, run the job again.

    Args:
        after: the wait until the next attempt, a timedelta or seconds; None: the processor's back-off.
        reason: stored as the attempt's error.
        pause: ``"key"``: for the time of ``after`` no other job with this job's limit key begins either, or
            no other job of its kind, if it has no key.

    Raises:
        ValueError: ``after`` is not a wait from 0 seconds to ten years; ``pause`` is not ``"key"``, or is
            given without ``after``.
        TypeError: ``after`` is a string.
    """

    def __init__(
        self,
        after: timedelta | float | None = None,
        reason: str = "the processor asked for a retry",
        *,
        pause: Literal["key"] | None = None,
    ) -> None:
        if pause not in (None, "key"):
            raise ValueError(f"pause={pause!r} must be 'key' or None")
        if pause is not None and after is None:
            raise ValueError("pause='key' needs after: for how long")
        if isinstance(after, str):
            rule = "must be a timedelta or a number of seconds; a reason is given as Retry(reason=…)"
            raise TypeError(f"retry after={ascii(after)[:80]} {rule}")
        super().__init__(reason)
        self.after = None if after is None else wait_in_seconds(after, "retry after")
        self.pause = pause

    __reduce__ = _without_init


class Fail(Exception):
    """Raised by a processor: the job failed for good, no further attempt."""

    def __init__(self, reason: str = "the processor gave the job up") -> None:
        super().__init__(reason)


class Snooze(Exception):
    """Raised by a processor: end this run and run the job again later. No attempt and no error is counted.

    After ``max_snoozes`` snoozes the next one fails the job.

    Args:
        after: the wait from now until the next run, as a timedelta or in seconds.
        reason: stored in the job's timeline.

    Raises:
        ValueError: ``after`` is not a wait from 0 seconds to ten years.
    """

    def __init__(self, after: timedelta | float, reason: str = "the processor asked for it") -> None:
        self.after = wait_in_seconds(after, "snooze after")
        super().__init__(reason)

    __reduce__ = _without_init
