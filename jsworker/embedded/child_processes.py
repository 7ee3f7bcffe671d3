"""Children that do not outlive the process that started them."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

from jsworker.embedded.os_account import Account
from jsworker.worker.isolation import parent_death_signal

_LEASH = Path(parent_death_signal.__file__)

Stream = int | IO[bytes] | None


def start_with_parent(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    death_signal: signal.Signals = signal.SIGTERM,
    account: Account | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child that gets ``death_signal`` when this process dies, however it dies.

    On Linux the kernel sends the signal; on other systems the child is a plain one. May be called from
    any thread: the child stays until the process dies, not only until the thread ends.

    Args:
        command: program and arguments; a name without a slash is looked up on the PATH of ``env``.
        env: the whole environment of the child; None hands on this process's own.
        cwd: working directory of the child; None keeps this process's own.
        stdin: as in ``subprocess.Popen``; so are stdout, stderr, pass_fds and start_new_session.
        stdout: see stdin.
        stderr: see stdin.
        pass_fds: see stdin.
        start_new_session: see stdin.
        death_signal: what the child gets when this process dies.
        account: the operating system's user to run as; None keeps this process's own.

    Raises:
        FileNotFoundError: no program has this name. One that cannot be executed ends with exit code 126.
    """
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    program = _program(str(command[0]), env, cwd)
    command_line = [
        sys.executable,
        "-I",
        "-S",
        str(_LEASH),
        os.getpid(),
        int(death_signal),
        uid,
        gid,
        program,
    ]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 -- the command is the caller's own
            [*map(str, command_line), *map(str, command)],
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=start_new_session,
        )

    return _in_lasting_thread(start)


def _program(name: str, env: Mapping[str, str] | None, cwd: Path | None) -> str:
    if os.sep in name:
        name = str((cwd or Path()).absolute() / name)
    found = shutil.which(name, path=(os.environ if env is None else env).get("PATH"))
    if found is None:
        raise FileNotFoundError(f"command {name!r} is not an executable file and not on the PATH")
    return os.path.abspath(found)  # noqa: PTH100 -- Path.resolve would follow links, which some programs are named by


def _in_lasting_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    # The kernel takes the end of the thread that forked for the death of the parent.
    if threading.current_thread() is threading.main_thread():
        return start()
    return _starter().submit(start).result()


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="jsworker-child-starter")
