"""Signals of a child: one at its parent's death, and those that are the parent's business.

Run as a script between fork and exec: change the user, ask for a signal at the parent's death, exec.

Arguments: pid of the parent, number of the signal, user id and group id (-1: as they are), program, its argv.
Python's own preexec_fn would do the same inside the forked child, where a process with threads may deadlock.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126


def main() -> None:
    """Become the program, or end with one line on stderr."""
    parent, death_signal, uid, gid = (int(text) for text in sys.argv[1:5])
    program, arguments = sys.argv[5], sys.argv[6:]
    # The program gets the dispositions that it would have had without this script.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        if uid >= 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # After the change of user, which would have cleared it.
        follow_parent(parent, death_signal)
        os.execv(program, arguments)  # noqa: S606 -- the command is the caller's own
    except OSError as error:
        sys.stderr.write(f"cannot execute {program}: {error.strerror}\n")
        sys.exit(CANNOT_EXECUTE)


def follow_parent(parent: int, death_signal: int) -> None:
    """Get ``death_signal`` when the parent dies (Linux); end at once when it is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        sys.exit(0)


def leave_to_parent(numbers: Iterable[signal.Signals]) -> None:
    """Do nothing at these signals. Processes that jobs start or fork get the usual dispositions back."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Not SIG_IGN, which programs that jobs start would inherit.
            signal.signal(number, _do_nothing)
    os.register_at_fork(after_in_child=_restore_usual_signals)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    return


def _restore_usual_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is _do_nothing:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


if __name__ == "__main__":
    main()
