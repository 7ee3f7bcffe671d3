"""Exit codes of processes, and how an error that ends a process is shown."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from jsworker.core.errors import JobNotCompleted, JsworkerError, ServersUnavailable, SettingsError, UsageError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
NOT_COMPLETED, TIMED_OUT = 3, 4
"""For a command that waits for a job: the job failed, was cancelled or is gone; it has not ended in time."""


class WrongUsage(UsageError):
    """The command was called in a way that makes no sense."""


class OutputFailed(JsworkerError):
    """Standard output cannot be written, for example because the disk is full."""


_OF_SEVERAL_LINES: Final = (SettingsError, ServersUnavailable)
"""Errors that are shown on several lines: one for each fault; the end of a server's log."""


def show_traceback(error: Exception) -> int:
    """Write an unexpected error to stderr, without values of variables, which may be secrets."""
    with suppress(AttributeError, ValueError):  # a job may have closed or replaced stderr
        traceback.print_exception(error)
    return FAILED


def exit_code_of(
    command: Callable[[], Any], *, on_unexpected: Callable[[Exception], int] = show_traceback
) -> int:
    """Run a command and return the exit code that it returns, or show its error and return the error's code.

    ``on_unexpected`` shows an error that is not jsworker's own nor a closed stdout's, and returns the code.
    """
    try:
        code = command()
        with writing_stdout(), suppress(AttributeError, ValueError):  # a job may have closed or replaced it
            sys.stdout.flush()
    except JsworkerError as error:
        show(error)
        return code_of(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return FAILED
    except Exception as error:  # noqa: BLE001 -- the last place where an error can be shown
        return on_unexpected(error)
    return int(code or DONE)


def code_of(error: JsworkerError) -> int:
    """Return the exit code of a process that ends in this error."""
    if isinstance(error, JobNotCompleted):
        return NOT_COMPLETED
    return WRONG_USAGE if isinstance(error, UsageError) else FAILED


def lines_of(error: JsworkerError) -> list[str]:
    """Return an error as it is shown: one line unless it is a list of faults."""
    lines = str(error).splitlines()
    return lines if isinstance(error, _OF_SEVERAL_LINES) else [" ".join(line.strip() for line in lines)]


def show(error: JsworkerError) -> None:
    """Write an error to stderr, as one line unless it is a list of faults."""
    with suppress(AttributeError, ValueError):  # as in ``show_traceback``
        for line in lines_of(error):
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Discard further output when stdout cannot be written.

    Raises:
        OutputFailed: it cannot be written.
        BrokenPipeError: its reader has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise OutputFailed(f"standard output: {error.strerror}") from None


def discard_stdout() -> None:
    """Close stdout for its reader, and discard further output, also that at the process's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
