"""Exit codes of processes, and how an error is shown that ends one."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from jsworker.core.errors import JobNotCompleted, JsworkerError, ServersUnavailable, SettingsError, UsageError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
NOT_COMPLETED, TIMED_OUT = 3, 4
"""Of a job that was waited for: it failed, was cancelled or is gone; it has not ended in time."""


class WrongUsage(UsageError):
    """The command was called in a way that makes no sense."""


_OF_SEVERAL_LINES: Final = (SettingsError, ServersUnavailable)
"""One line for each fault; the end of a server's log."""


def show_traceback(error: Exception) -> int:
    """Write an unexpected error to stderr, without values of variables, which may be secrets."""
    traceback.print_exception(error)
    return FAILED


def exit_code_of(
    command: Callable[[], Any], *, on_unexpected: Callable[[Exception], int] = show_traceback
) -> int:
    """Run a command, show its error, and return its exit code, or the one that the command returns.

    ``on_unexpected`` shows an error that is neither jsworker's own nor stdout's, and returns the code.
    """
    try:
        code = command()
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
    for line in lines_of(error):
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def discard_stdout() -> None:
    """Close stdout for its reader, and discard what is still to be written, at the process's end too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
