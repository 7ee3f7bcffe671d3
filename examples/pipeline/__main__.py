"""``python -m pipeline``: one night of the pipeline, on real servers, in a minute at most."""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jsworker import Event, JobClient, JsworkerError, Worker, load_settings
from jsworker.embedded import EmbeddedServers
from pipeline.jobs import FOLDER, PROCESSORS, NightlyReport
from pipeline.logs import write_sample

_LOOK_SECONDS: Final = 0.2
_NIGHT_SECONDS: Final = 300.0


class NightFailed(Exception):
    """The workflow has not completed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one night and print its report; the exit code is 0 if the report is written."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Run one night of the pipeline.")
    parser.add_argument("--lines", type=int, default=20_000, help="of each sample log; default: 20,000")
    parser.add_argument("--data", type=Path, help="the servers' data folder; default: one in your cache")
    options = parser.parse_args(arguments)
    _write_samples(lines=options.lines)
    data = options.data or EmbeddedServers().data.with_name("pipeline")
    try:
        with EmbeddedServers(data) as servers:
            os.environ.update(servers.environment())
            upgrade = [sys.executable, "-P", "-m", "jsworker", "db", "upgrade"]
            subprocess.run(upgrade, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 -- ours
            print(asyncio.run(asyncio.wait_for(_night(), _NIGHT_SECONDS)))  # noqa: T201 -- what it is about
    except (NightFailed, JsworkerError, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"the night failed: {error}", file=sys.stderr)  # noqa: T201 -- as above
        return 1
    return 0


def _write_samples(*, lines: int) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        write_sample(FOLDER / "logs" / f"disk-{number % 2}" / f"web-{number}.log", lines=lines, seed=number)
    (FOLDER / "subscribers.txt").write_text("ada grace linus\n")


async def _night() -> str:
    """Let the schedule begin now, and follow the workflow that it starts; return the report."""
    worker = Worker(PROCESSORS, load_settings())
    worker.on("worker.degraded", _show_trouble)
    worker.on("job.error", _show_trouble)
    async with worker, JobClient.from_env() as client:
        job = await client.schedules.run_now(NightlyReport.kind)
        workflow = await client.result(job.id, timeout=60)
        while True:
            found = await client.workflows.get(workflow)
            _show(found)
            if found["finished_at"] is not None:
                break
            await asyncio.sleep(_LOOK_SECONDS)
    if found["status"] != "completed":
        raise NightFailed(f"workflow {workflow} is {found['status']}")
    report = max((FOLDER / "reports").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return f"{report}\n{report.read_text()}"


def _show(found: dict[str, Any]) -> None:
    parts = []
    for node in found["nodes"]:
        jobs = node["jobs"]
        parts.append(f"{node['name']} {jobs.get('completed', 0)}/{sum(jobs.values())}")
    sys.stderr.write(f"{', '.join(parts)}\n")


def _show_trouble(event: Event) -> None:
    why = event.fields.get("reason") or event.fields.get("error")
    sys.stderr.write(f"{event.name}: {why}\n")


if __name__ == "__main__":
    sys.exit(main())
