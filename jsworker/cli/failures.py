"""How a command ends: errors on stderr, and the exit code. Imports nothing slow: worker processes use it."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jsworker.core.errors import (
    InvalidJson,
    InvalidName,
    InvalidPayload,
    InvalidTarget,
    JsworkerError,
    ServersUnavailable,
    SettingsError,
)

if TYPE_CHECKING:
    import typer

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class WrongUsage(JsworkerError):
    """The command was called in a way that makes no sense."""


_USAGE_ERRORS = (SettingsError, InvalidName, InvalidJson, InvalidPayload, InvalidTarget, WrongUsage)
_OF_SEVERAL_LINES = (SettingsError, ServersUnavailable)
"""One line for each fault; the end of a server's log."""


def remark(line: str) -> None:
    """Write one line for people to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def exit_code_of(command: Callable[[], Any]) -> int:
    """Run a command, report its error, and return its exit code.

    A command returns its code; None is 0. An unexpected error is shown with its traceback, without the
    values of local variables: those may be secrets.
    """
    try:
        code = command()
        sys.stdout.flush()
    except JsworkerError as error:
        report(error)
        return code_of(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return FAILED
    except Exception as error:  # noqa: BLE001 -- the last place where an error can be shown
        return _report_unexpected(error)
    return int(code or DONE)


def code_of(error: JsworkerError) -> int:
    """Return the exit code of a command that ends in this error."""
    return WRONG_USAGE if isinstance(error, _USAGE_ERRORS) else FAILED


def report(error: JsworkerError) -> None:
    """Write an error to stderr, as one line unless it is a list of faults."""
    for line in lines_of(error):
        remark(line)


def lines_of(error: JsworkerError) -> list[str]:
    """Return an error as it is shown: one line unless it is a list of faults."""
    lines = str(error).splitlines()
    return lines if isinstance(error, _OF_SEVERAL_LINES) else [" ".join(line.strip() for line in lines)]


def _report_unexpected(error: Exception) -> int:
    import typer  # noqa: PLC0415 -- a worker process ends without the command line's library

    if isinstance(error, typer.TyperException):
        _report_usage(error)
        return error.exit_code
    traceback.print_exc()
    return FAILED


def _report_usage(error: "typer.TyperException") -> None:
    line = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if line:  # no arguments at all: the help has been shown
        remark(f"{line}; see {context.command_path} --help" if context else line)


def _close_stdout() -> None:
    """Discard what is still to be written, at the end of the process too: the reader of stdout has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
