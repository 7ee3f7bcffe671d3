"""Children that do not outlive the process that started them."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jsworker.worker.isolation import parent_death_signal


def _begin() -> None:
    """Begin without a thread; a forked process does not have that of its parent, and would wait for it."""
    global _lasting_thread  # noqa: PLW0603 -- one for the process
    _lasting_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jsworker-child-starter")


_lasting_thread: ThreadPoolExecutor
_begin()
os.register_at_fork(after_in_child=_begin)


class Account(NamedTuple):
    """A user of the operating system."""

    uid: int
    gid: int


def start_with_parent(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
    account: Account | None = None,
    pass_fds: Sequence[int] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a child that gets ``death_signal`` when this process dies, however it dies.

    On Linux the kernel sends the signal, elsewhere a process that watches the child does. May be called
    from any thread: the end of the calling thread does not end the child.

    A program's name without a slash is looked up on the PATH of ``env``; FileNotFoundError is raised if no
    executable file is found. A child that fails to execute its program ends with exit code 126. The options
    are those of ``subprocess.Popen``.
    """
    ids = account or (-1, -1)
    script = [sys.executable, "-I", "-S", parent_death_signal.__file__]
    program = _program(str(command[0]), env, cwd)
    lifeline = parent_death_signal.lifeline()
    arguments = [*script, os.getpid(), int(death_signal), lifeline, *ids, program, *command]
    inherited = [*pass_fds, lifeline] if lifeline >= 0 else pass_fds

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 -- the caller's
            [*map(str, arguments)], env=env, cwd=cwd, pass_fds=inherited, **options
        )

    if threading.current_thread() is threading.main_thread():
        return start()
    # The kernel sends the signal when the thread that forked ends, so a thread that never ends must fork.
    return _lasting_thread.submit(start).result()


def _program(name: str, env: Mapping[str, str] | None, cwd: Path | None) -> str:
    if os.sep in name:
        name = str((cwd or Path()).absolute() / name)
    found = shutil.which(name, path=(os.environ if env is None else env).get("PATH"))
    if found is None:
        raise FileNotFoundError(f"command {name!r} is not an executable file and not on the PATH")
    return os.path.abspath(found)  # noqa: PTH100 -- Path.resolve would follow links, and some programs depend on a link's name
