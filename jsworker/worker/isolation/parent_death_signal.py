"""Signals of a child: one at its parent's death, and those that are the parent's business.

Run as a script between fork and exec: change the user, ask for a signal at the parent's death, exec.

Arguments: pid of the parent, number of the signal, the parent's lifeline, user id and group id (-1: as they
are), program, its argv. Python's own preexec_fn would do the same inside the forked child, where a process
with threads may deadlock.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126
_LOOK_MILLISECONDS = 500
_MOST_FILES = 2**16
"""Where the limit is said to be endless."""


def main() -> None:
    """Become the program, or end with one line on stderr."""
    parent, death_signal, ends_with_parent, uid, gid = (int(text) for text in sys.argv[1:6])
    program, arguments = sys.argv[6], sys.argv[7:]
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
        follow_parent(parent, death_signal, ends_with_parent)
        os.execv(program, arguments)  # noqa: S606 -- the command is the caller's own
    except OSError as error:
        sys.stderr.write(f"cannot execute {program}: {error.strerror}\n")
        sys.exit(CANNOT_EXECUTE)


@cache
def lifeline() -> int:
    """Return a descriptor that a child is to inherit, whose file ends when this process is dead.

    -1: it needs none, because the kernel sends signals at a parent's death (Linux). The file lives on in a
    process that this one has forked and that has not called exec.
    """
    if _kernel_function() is not None:
        return -1
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    return reading


def follow_parent(parent: int, death_signal: int, lifeline: int) -> None:
    """Get ``death_signal`` when the parent dies; end at once when it is dead already.

    ``lifeline`` is what the function of that name has returned in the parent. Where the kernel does not help,
    a process watches over this one, which gets the signal within a second, whatever it does. To be called
    before there are threads.
    """
    prctl = _kernel_function()
    if lifeline >= 0:
        _start_watching(lifeline, death_signal)
    elif prctl is not None and prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        sys.exit(0)


def _kernel_function() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


def _start_watching(lifeline: int, death_signal: int) -> None:
    watched = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork():
        os.close(lifeline)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return
    # In the watching process, which must not keep open what others wait for the end of.
    os.closerange(0, lifeline)
    os.closerange(lifeline + 1, min(os.sysconf("SC_OPEN_MAX"), _MOST_FILES))
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while not poll.poll(_LOOK_MILLISECONDS):
        if os.getppid() != watched:
            os._exit(0)
    if os.getppid() == watched:
        os.kill(watched, death_signal)
    os._exit(0)


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
