"""The same at default settings, in real time: a pod is killed, without a restart and with one."""

import asyncio
from pathlib import Path
from typing import Any

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.settings import Settings
from tests.faults.fleet import Fleet, Pod
from tests.faults.journal import read_journals
from tests.faults.stores import PREFIX, STREAM, Stores, new_stores

WITHOUT_RESTART_SECONDS = 22.0
WITH_RESTART_SECONDS = 3.0
"""Bounds: the first from the kill, the second from the start of the pod's next life."""

_JOBS = 6
_JOB_SECONDS = 600.0
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0


async def at_defaults(folder: Path) -> dict[str, Any]:
    """Return after how many seconds a killed pod's jobs ran again, and whether that is within the bounds."""
    stores = new_stores()
    try:
        await asyncio.to_thread(stores.start)
        found = await _measure(stores, folder)
    finally:
        await asyncio.to_thread(stores.discard)
    ok = (
        found["without_restart_seconds"] <= WITHOUT_RESTART_SECONDS
        and found["with_restart_seconds"] <= WITH_RESTART_SECONDS
    )
    return {"ok": ok, **found}


async def _measure(stores: Stores, folder: Path) -> dict[str, Any]:
    settings = {"stream": STREAM, "subject_prefix": PREFIX}
    fleet = Fleet(settings, folder, stores.database_url, stores.nats_url)
    try:
        pods = [await fleet.add("pod0"), await fleet.add("pod1")]
        await _until_working(*pods)
        own = Settings(**{**settings, "database_url": stores.admin_url, "nats_url": stores.nats_url})
        async with JobClient(own) as client:
            first = await _enqueue(client, folder, _JOBS)
            await _until_known(stores, *pods)
            dead, other = sorted(pods, key=lambda pod: len(_held(pod, folder, first)), reverse=True)
            without = await _kill(dead, folder, first, stay_away=True)
            # Fresh jobs, for those that were taken back once already are put off the next time.
            second = await _enqueue(client, folder, _JOBS // 2)
            await _until_known(stores, other)
            with_restart = await _kill(other, folder, second, stay_away=False)
    finally:
        await fleet.close()
    return {"without_restart_seconds": round(without, 2), "with_restart_seconds": round(with_restart, 2)}


async def _enqueue(client: JobClient, folder: Path, count: int) -> set[str]:
    """Enqueue jobs and wait until all of them run."""
    jobs = await client.enqueue_many("ordinary", [{"seconds": _JOB_SECONDS}] * count)
    ids = {str(job.id) for job in jobs}
    await _run(folder, ids, times=1)
    return ids


async def _kill(pod: Pod, folder: Path, jobs: set[str], *, stay_away: bool) -> float:
    """Kill a pod and return the seconds until all its jobs ran again, from the kill or from its restart."""
    held = _held(pod, folder, jobs)
    if not held:
        raise AssertionError(f"{pod.hostname} holds no job")
    pod.wanted = not stay_away
    killed_at = boottime()
    pod.kill_all()
    await _run(folder, held, times=2)
    again = max(float(line["at"]) for line in _starts(folder, held))
    return again - (killed_at if stay_away else pod.started_at)


def _held(pod: Pod, folder: Path, jobs: set[str]) -> set[str]:
    """Return which jobs a pod runs; none of them ends by itself."""
    workers = set(pod.workers())
    return {line["job"] for line in _starts(folder, jobs) if line["pid"] in workers}


def _starts(folder: Path, jobs: set[str]) -> list[dict[str, Any]]:
    lines = read_journals(folder, "run")
    return [line for line in lines if line["what"] == "start" and line["job"] in jobs]


async def _run(folder: Path, jobs: set[str], *, times: int) -> None:
    """Wait until jobs have begun so many times."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while len(_starts(folder, jobs)) < times * len(jobs):  # noqa: ASYNC110 -- files tell of no event
            await asyncio.sleep(_POLL_SECONDS)


async def _until_known(stores: Stores, *pods: Pod) -> None:
    """Wait until the workers are known to answer on NATS; before, their silence there proves nothing."""
    query = "SELECT count(*) FROM jsworker.workers WHERE answers AND hostname = ANY(%s)"
    hostnames = [pod.hostname for pod in pods]
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while (await stores.execute(query, hostnames))[0][0] != len(pods):  # noqa: ASYNC110 -- a row tells of no event
            await asyncio.sleep(_POLL_SECONDS)


async def _until_working(*pods: Pod) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not all(pod.workers() for pod in pods):  # noqa: ASYNC110 -- files tell of no event
            await asyncio.sleep(_POLL_SECONDS)
