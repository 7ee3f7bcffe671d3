"""``jsworker demo``: real repositories, real servers, three workers, one of them killed, nothing lost."""

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jsworker.client import JobClient
from jsworker.core.errors import JsworkerError
from jsworker.core.settings import load_settings, variable_of
from jsworker.demo.account import Account
from jsworker.demo.chart import require_matplotlib
from jsworker.demo.fleet import Fleet
from jsworker.demo.folder import DemoFolder
from jsworker.demo.git import RepositoryEmpty, RepositoryNotFound
from jsworker.demo.live import open_view
from jsworker.demo.output import Output, open_chart_folder
from jsworker.demo.run import Run, cancel_leftovers
from jsworker.demo.thresholds import SHORT
from jsworker.demo.work import Project, read_projects
from jsworker.embedded import EmbeddedServers
from jsworker.ownership.upgrading import upgrade_database

CHART_FOLDER = Path("jsworker-demo")

_DONE, _FAILED, _WRONG_USAGE, _SIGNALLED = 0, 1, 2, 128
_WORKERS = 3
_JOB_SLOTS = 2
_STATEMENT_SECONDS = 4.0
"""For the demo's own statements: a look that comes late harms nobody."""


def run_demo(
    repositories: Sequence[Path], *, kill: bool, json_output: bool, data: Path | None, out: Path | None
) -> int:
    """Count the lines of repositories over time on three workers and show what happens.

    To be called from the main thread: it listens to SIGINT, SIGTERM and SIGHUP, and stops in order at the
    first of them, at once at the second.

    Args:
        repositories: local git repositories; none means the one around the working directory.
        kill: whether to kill one of the workers with SIGKILL in the middle.
        json_output: print one JSON object on standard output and all else on standard error.
        data: the data folder of the servers; None takes ``jsworker/demo`` in the user's cache folder.
        out: the folder for the charts; None takes ``jsworker-demo`` in the working directory.

    Returns:
        The exit code: 0 every job is completed and all figures agree, 1 not so, 2 no repository or an empty
        one, 128 and its number after a signal.
    """
    output = Output(json_output=json_output)
    with _stop_signals() as stop:
        try:
            return _run(repositories, kill=kill, data=data, charts=out or CHART_FOLDER, output=output)
        except KeyboardInterrupt:
            output.complain("interrupted: workers and servers are stopped")
            return _SIGNALLED + stop.number
        except JsworkerError as error:
            output.complain(str(error))
            return _WRONG_USAGE if isinstance(error, RepositoryNotFound | RepositoryEmpty) else _FAILED


def _run(repositories: Sequence[Path], *, kill: bool, data: Path | None, charts: Path, output: Output) -> int:
    require_matplotlib()
    projects = read_projects(repositories)
    open_chart_folder(charts)
    folder = DemoFolder(data)
    with folder.taken(), _no_settings_from_outside():
        output.tell_beginning(projects, folder.path)
        with EmbeddedServers(folder.path) as servers:
            upgrade_database(servers.database_url)
            account = asyncio.run(_work(projects, kill=kill, servers=servers, folder=folder, output=output))
    all_well = output.tell_end(account, charts=charts, data=folder.path)
    if account.outcome.lost:
        output.complain(folder.ends_of_logs())
    return _DONE if all_well else _FAILED


async def _work(
    projects: Sequence[Project], *, kill: bool, servers: EmbeddedServers, folder: DemoFolder, output: Output
) -> Account:
    addresses = {"database_url": servers.database_url, "nats_url": servers.nats_url}
    settings = load_settings(**addresses, statement_timeout=_STATEMENT_SECONDS)
    async with JobClient(settings) as client:
        await cancel_leftovers(client)
        with _fleet(addresses, folder) as fleet, open_view(output.console) as view:
            run = Run(projects, client=client, fleet=fleet, view=view, kill=kill)
            try:
                run.show()
                await fleet.wait_until_registered(client.database)
                account = await run.play()
            finally:
                await fleet.stop()
            run.show()
            return account


def _fleet(addresses: Mapping[str, str], folder: DemoFolder) -> Fleet:
    settings = {
        **addresses,
        **SHORT,
        "concurrency": _JOB_SLOTS,
        "log_format": "console",
    }
    return Fleet(
        {variable_of(name): str(value) for name, value in settings.items()},
        logs=folder.logs,
        size=_WORKERS,
        run=secrets.token_hex(3),
    )


class _StopSignals:
    """Which signal is to be answered in the exit code."""

    def __init__(self) -> None:
        self.number: int = signal.SIGINT

    def pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- a signal handler's shape
        """Do what Ctrl-C would do: cancel what runs in the event loop, or raise KeyboardInterrupt."""
        self.number = number
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:  # a shell's background job, which ignores Ctrl-C
            raise KeyboardInterrupt


@contextmanager
def _stop_signals() -> Iterator[_StopSignals]:
    stop = _StopSignals()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop.pass_on) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_settings_from_outside() -> Iterator[None]:
    """Keep settings meant for other servers, their logins above all, away from the demo's own."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("JSWORKER_")}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)
