"""How a command ends: errors on stderr, and the exit code."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jsworker.core import exit_codes
from jsworker.core.exit_codes import DONE, FAILED, WrongUsage

if TYPE_CHECKING:
    import typer

__all__ = ["DONE", "FAILED", "WrongUsage", "exit_code_of"]


def remark(line: str) -> None:
    """Write one line for people to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def exit_code_of(command: Callable[[], Any]) -> int:
    """Run a command, report its error, and return its exit code.

    A command returns its code; None is 0. An unexpected error is shown with its traceback, without the
    values of local variables: those may be secrets.
    """
    return exit_codes.exit_code_of(command, on_unexpected=_report_unexpected)


def _report_unexpected(error: Exception) -> int:
    import typer  # noqa: PLC0415 -- only where it was used

    if isinstance(error, typer.TyperException):
        _report_usage(error)
        return error.exit_code
    return exit_codes.show_traceback(error)


def _report_usage(error: "typer.TyperException") -> None:
    line = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if line:  # no arguments at all: the help has been shown
        remark(f"{line}; see {context.command_path} --help" if context else line)
