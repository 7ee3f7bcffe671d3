"""``make demo``: real repositories, real servers, three workers, one of them killed, nothing lost."""

import argparse
import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from code_evolution.dashboard import open_dashboard
from code_evolution.git import GitError, NoRepository, shown
from code_evolution.history import Repository, open_repository
from code_evolution.outcome import Outcome, conclude
from code_evolution.report import complain, print_beginning, print_end
from code_evolution.run import Run, cancel_leftovers
from code_evolution.view import open_view
from code_evolution.workers import SHORT, WorkerEnded, end_of_log, start_workers
from jsworker import JobClient, JsworkerError, Settings, load_settings
from jsworker.embedded import EmbeddedServers

_DONE, _FAILED, _WRONG_USAGE, _SIGNALLED = 0, 1, 2, 128
_WORKERS = 3
_CLIENT_STATEMENT_SECONDS = 4.0
"""The time-out of the demo's own statements: if it reads the jobs late, no job is harmed."""


_signals: list[int] = []
"""The signals, other than Ctrl-C, that have come."""


class CannotRun(Exception):
    """A folder cannot be written to, another demo uses it, or the tables cannot be made."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code.

    0: every job is completed and all figures agree; 1: otherwise; 2: no repository, or an empty one; 128 plus
    the signal's number after a signal.
    """
    options = _options(arguments)
    data = (options.data or EmbeddedServers().data.with_name("demo")).expanduser().resolve()
    console = Console(stderr=options.json)
    try:
        found = {each.git_dir: each for each in map(open_repository, options.repositories or [Path.cwd()])}
        _make_folder(options.out)
        with _only_demo_in(data):
            print_beginning(console, list(found.values()), data)
            outcome = _run(list(found.values()), kill=options.kill, data=data, console=console)
        well = print_end(console, outcome, charts=options.out, data=data, as_json=options.json)
        if outcome.lost:
            complain("\n".join(end_of_log(log) for log in sorted((data / "logs").glob("*.log"))))
    except KeyboardInterrupt:
        complain("interrupted: workers and servers are stopped")
        return _SIGNALLED + next(iter(_signals), signal.SIGINT)
    except NoRepository as error:
        complain(str(error))
        return _WRONG_USAGE
    except (GitError, CannotRun, WorkerEnded, JsworkerError) as error:
        complain(str(error))
        return _FAILED
    return _DONE if well else _FAILED


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=…",
        description="Count lines by language over the history of git repositories, on three workers, one of "
        "which is killed on the way: its jobs are taken back and run again, and nothing is lost.",
    )
    add = parser.add_argument
    add("repositories", metavar="REPO", nargs="*", type=Path, help="default: the one around this folder")
    add("--kill", action=argparse.BooleanOptionalAction, default=True, help="kill one worker in the middle")
    add("--json", action="store_true", help="print one JSON object at the end")
    add("--data", metavar="DIR", type=Path, help="the servers' data folder; default: one in your cache")
    add("--out", metavar="DIR", type=Path, default=Path("jsworker-demo"), help="where charts are written")
    return parser.parse_args(arguments)


def _run(repositories: Sequence[Repository], *, kill: bool, data: Path, console: Console) -> Outcome:
    # Settings for other servers, above all their logins, must not reach the demo's own servers.
    for name in [name for name in os.environ if name.startswith("JSWORKER_")]:
        del os.environ[name]
    with EmbeddedServers(data) as servers:
        short = {f"JSWORKER_{name.upper()}": str(seconds) for name, seconds in SHORT.items()}
        environment = {**os.environ, **servers.environment(), **short}
        upgrade = [sys.executable, "-P", "-m", "jsworker", "db", "upgrade"]
        done = subprocess.run(upgrade, env=environment, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 -- ours
        if done.returncode:
            raise CannotRun(f"jsworker db upgrade failed in {shown(data)}")
        return asyncio.run(_work(repositories, environment, kill=kill, logs=data / "logs", console=console))


async def _work(
    repositories: Sequence[Repository],
    environment: Mapping[str, str],
    *,
    kill: bool,
    logs: Path,
    console: Console,
) -> Outcome:
    settings = load_settings(
        database_url=environment["JSWORKER_DATABASE_URL"],
        nats_url=environment["JSWORKER_NATS_URL"],
        statement_timeout=_CLIENT_STATEMENT_SECONDS,
    )
    with open_dashboard(settings, console):
        return await _count_lines(settings, repositories, environment, kill=kill, logs=logs, console=console)


async def _count_lines(
    settings: Settings,
    repositories: Sequence[Repository],
    environment: Mapping[str, str],
    *,
    kill: bool,
    logs: Path,
    console: Console,
) -> Outcome:
    async with JobClient(settings) as client:
        await cancel_leftovers(client)
        with open_view(console) as show:
            async with start_workers(_WORKERS, environment, logs) as workers:
                run = Run(repositories, client=client, workers=workers, show=show)
                run.show()
                await asyncio.gather(*(worker.wait_until_started() for worker in workers))
                if kill:
                    await run.begin_and_kill()
                await run.finish()
            run.show()
        rows, resets = await run.watch.rows(), frozenset(await run.watch.resets())
        return conclude(run.watch, rows, resets, kill_wanted=kill)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does: the first signal stops in order, the second one at once."""
    _signals.append(number)
    does = signal.getsignal(signal.SIGINT)
    if not callable(does):  # it is ignored, as in the background
        raise KeyboardInterrupt
    does(signal.SIGINT, frame)  # asyncio's own, which cancels the main task: no other is hit in its midst


def _make_folder(folder: Path) -> None:
    """Make a folder before the work begins, which needs the folder only at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotRun(f"folder {shown(folder)} cannot be used: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise CannotRun(f"folder {shown(folder)}: no permission to write")


@contextmanager
def _only_demo_in(data: Path) -> Iterator[None]:
    """Lock the data folder, so that no other demo counts, kills or cancels this one's jobs."""
    _make_folder(data / "logs")
    with (data / "demo.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for its end, or take another folder with --data"
            raise CannotRun(f"another demo runs in {shown(data)}: {hint}") from None
        yield


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            signal.signal(each, _interrupt)
    sys.exit(main())
