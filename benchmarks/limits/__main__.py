"""``python -m benchmarks.limits``: one key with a limit of 4, four workers, a kill -9 every second."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.facts import gather
from benchmarks.limits import journal
from benchmarks.limits.journal import Verdict
from benchmarks.limits.systems import LIMIT, SILENCE_SECONDS, SYSTEMS, System
from benchmarks.processes import ROOT
from benchmarks.servers import environment_with, running_servers
from jsworker.embedded import start_with_parent

WORKERS = 4
_JOBS_PER_SECOND = 120
_SETTLE_SECONDS = 10 * SILENCE_SECONDS
_WATCH_SECONDS = 5.0


class Fleet:
    """Four workers, each in a process group of its own."""

    def __init__(self, system: System, variables: Mapping[str, str], log: Path) -> None:
        self._system = system
        self._variables = dict(variables)
        self._log = log
        self._workers: list[subprocess.Popen[bytes]] = []
        self.kills: dict[int, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the workers while the block runs; kill them at its end."""
        self._workers = [self._start() for _ in range(WORKERS)]
        try:
            yield
        finally:
            for worker in self._workers:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()

    def kill_one(self) -> None:
        """Kill one at random, and start another in its place."""
        place = random.randrange(WORKERS)  # noqa: S311 -- which worker dies
        killed = self._workers[place]
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        self.kills[killed.pid] = time.monotonic()
        self._workers[place] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return start_with_parent(
                self._system.command,
                env=environment_with(self._variables),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
                death_signal=signal.SIGKILL,
            )


def measure(system: System, *, seconds: float, every: float, progress: Progress) -> tuple[Verdict, int]:
    """Run a system under kills and a while longer, and return the verdict and the number of kills."""
    whole = seconds + _SETTLE_SECONDS + _WATCH_SECONDS
    bar = progress.add_task(system.name, total=whole)
    with running_servers() as servers, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.touch()
        variables = system.prepare(servers, int(whole * _JOBS_PER_SECOND))
        fleet = Fleet(system, dict(variables) | {journal.VARIABLE: str(path)}, Path(folder, "log"))
        with fleet.running():
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                time.sleep(every)
                fleet.kill_one()
                progress.advance(bar, every)
            kills_ended = time.monotonic()
            time.sleep(_SETTLE_SECONDS)
            settled = time.monotonic()
            time.sleep(_WATCH_SECONDS)
            progress.update(bar, completed=whole)
            until = time.monotonic()
        found = journal.judge(
            path, fleet.kills, limit=LIMIT, kills_ended=kills_ended, settled=settled, until=until
        )
        if not found.runs:
            sys.exit(f"{system.name} has run nothing:\n{Path(folder, 'log').read_text()[-2000:]}")
        return found, len(fleet.kills)


def main() -> None:
    """Measure the systems, print a table, and write the figures to a file if one is named."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="for which processes are killed")
    options.add_argument("--every", type=float, default=1.0, help="seconds from one kill to the next")
    options.add_argument("--only", choices=SYSTEMS, help="one of the systems")
    options.add_argument("--json", type=Path, help="append the figures to this file")
    given = options.parse_args()
    table = Table(
        "system",
        "kills",
        "runs",
        "limit exceeded",
        "most at once",
        "slots in use",
        "standstill",
        "ended twice",
    )
    figures = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name in [given.only] if given.only else SYSTEMS:
            found, kills = measure(SYSTEMS[name], seconds=given.seconds, every=given.every, progress=progress)
            figures[SYSTEMS[name].name] = asdict(found) | {"kills": kills}
            table.add_row(
                SYSTEMS[name].name,
                str(kills),
                str(found.runs),
                str(found.exceeded),
                f"{found.most} of {LIMIT}",
                f"{found.busy:.0%}",
                f"{found.standstill:.1f} s",
                str(found.twice),
            )
    Console().print(table)
    if given.json:
        asked = {"seconds": given.seconds, "every": given.every, "workers": WORKERS, "limit": LIMIT}
        with given.json.open("a", encoding="utf-8") as out:
            out.write(
                json.dumps({"limits_beside_peers": {**gather(), "asked": asked, "systems": figures}}) + "\n"
            )


if __name__ == "__main__":
    main()
