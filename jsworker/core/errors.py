"""Every error that jsworker raises on purpose, and the two that a processor raises on purpose.

A class docstring is the default message; a more exact one is given where the error is raised.
"""

import inspect


class JsworkerError(Exception):
    """jsworker could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.getdoc(type(self)) or type(self).__name__)


class UsageError(JsworkerError):
    """Something was called in a way that makes no sense; commands end with exit code 2."""


class SettingsError(UsageError):
    """A setting is wrong or missing."""

    @property
    def lines(self) -> list[str]:
        """The faults, one line each."""
        return str(self).split("\n")


class InvalidName(UsageError, ValueError):
    """A kind or unique key holds characters that are not allowed."""


class InvalidJson(UsageError, ValueError):
    """A value cannot be stored as JSON."""


class InvalidPayload(UsageError, ValueError):
    """A payload does not fit the processor's model or the size limit."""


class InvalidTarget(UsageError):
    """A processor target cannot be imported or is no JobProcessor."""


class DatabaseUnavailable(JsworkerError):
    """PostgreSQL did not answer."""


class DatabaseBusy(DatabaseUnavailable):
    """PostgreSQL answered, and takes no further connection for now."""


class DatabaseRefused(JsworkerError):
    """PostgreSQL refused the login or the statement.

    Attributes:
        sqlstate: PostgreSQL's five-character code, None for a refused login.
    """

    sqlstate: str | None = None


def may_answer_later(error: BaseException) -> bool:
    """Return whether PostgreSQL is away, or refused a login, which may pass: passwords are changed."""
    return isinstance(error, DatabaseUnavailable) or (
        isinstance(error, DatabaseRefused) and error.sqlstate is None
    )


class MigrationMissing(JsworkerError):
    """The database has no jsworker schema of this version: run `jsworker db upgrade`."""


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


class OwnershipLost(JsworkerError):
    """This run no longer owns its job."""


class JobNotFound(JsworkerError):
    """No job has this id."""


class TransitionRefused(JsworkerError):
    """The job's state does not allow this."""


class WorkflowNotFound(JsworkerError):
    """No workflow has this id."""


class WorkflowFailed(JsworkerError):
    """A workflow has no result: a job of its last node has failed, was cancelled, or was pruned."""


class ServersUnavailable(JsworkerError):
    """The embedded servers could not be started."""


class Retry(Exception):
    """Raised by a processor: this attempt failed, run the job again.

    Args:
        after: seconds until the next attempt; None takes the processor's back-off.
        reason: stored as the attempt's error.
    """

    def __init__(self, after: float | None = None, reason: str = "the processor asked for a retry") -> None:
        super().__init__(reason)
        self.after = after


class Fail(Exception):
    """Raised by a processor: the job failed for good, no further attempt."""

    def __init__(self, reason: str = "the processor gave the job up") -> None:
        super().__init__(reason)
