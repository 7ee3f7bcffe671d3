"""Jobs that harm their own process, and operators who intervene."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from jsworker import JobClient
from jsworker.core.errors import JsworkerError
from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.fleet import send
from tests.faults.history import pid_of, pod_of

_END_SECONDS = 120.0
_INTERVENTIONS = 8
_PAUSE_SECONDS = 1.0
_PAUSED = (("limited", "tenant-0"), ("rated", None))


async def event_loop_block(field: Battlefield) -> None:
    """A job blocks its event loop for longer than watchdog and stale threshold."""
    await _with_owner(field, "event_loop_block", "loop-blocking", 3 * field.stale_seconds, kill=False)


async def gil_hold(field: Battlefield) -> None:
    """A job lets no thread of its process run; who kills it if not a supervisor? The harness, at last."""
    await _with_owner(field, "gil_hold", "gil-holding", 0.0, kill=True)


async def deaf_thread(field: Battlefield) -> None:
    """A plain function ignores its time-out."""
    await _with_owner(field, "deaf_thread", "deaf", 4.0, kill=False)


async def quiet_phase(field: Battlefield) -> None:
    """A job announces that its process will be silent, for longer than watchdog and stale threshold."""
    await _with_owner(field, "quiet_phase", "quiet", 1.3 * field.stale_seconds, kill=False)


async def poison(field: Battlefield) -> None:
    """A job kills its process in every run, until it has used up its stalls."""
    async with field.fault("poison", "process") as fault:
        jobs = await field.enqueue("poisonous")
        fault.fired = await field.ends(jobs, _END_SECONDS)
        for owner in await _owners_of(field, jobs[0]):
            fault.pods.add(pod_of(owner))
            fault.pids.add(pid_of(owner))


async def operator_clears(field: Battlefield) -> None:
    """An operator takes running jobs from their owners."""
    await _intervene(
        field,
        "operator_clears",
        ["processing"],
        lambda client, job: client.clear_and_reenqueue(job, "told so"),
    )


async def operator_cancels(field: Battlefield) -> None:
    """An operator cancels jobs that run, and jobs that wait."""
    await _intervene(
        field, "operator_cancels", ["processing", "queued"], lambda client, job: client.cancel(job)
    )


async def operator_pauses(field: Battlefield) -> None:
    """An operator pauses a key, and a kind, each for longer than a scan."""
    async with field.fault("operator_pauses", "operator"), JobClient(field.settings) as client:
        for _ in range(3):
            for kind, key in _PAUSED:
                await client.pause(kind, key, reason="told so")
            await asyncio.sleep(_PAUSE_SECONDS)
            for kind, key in _PAUSED:
                await client.resume(kind, key)


async def operator_retries(field: Battlefield) -> None:
    """An operator retries what has failed, members of batches too: those are opened again."""
    failed = (
        "SELECT id::text FROM jsworker.jobs WHERE kind = 'doomed' AND status = 'failed'"
        " ORDER BY batch_id IS NULL, random() LIMIT %s"
    )
    async with field.fault("operator_retries", "operator") as fault, JobClient(field.settings) as client:
        await field.ends(await field.enqueue("doomed"), _END_SECONDS)
        for row in await field.stores.execute(failed, _INTERVENTIONS):
            await client.retry(str(row[0]))
            fault.jobs.add(str(row[0]))
        fault.fired = bool(fault.jobs)


async def registry_row_deleted(field: Battlefield) -> None:
    """The rows of live workers are deleted under them."""
    async with field.fault("registry_row_deleted", "registry") as fault:
        for _ in range(3):
            gone = await field.stores.execute("DELETE FROM jsworker.workers RETURNING id")
            fault.fired = bool(gone)
            await asyncio.sleep(field.stale_seconds / 2)


async def _with_owner(field: Battlefield, name: str, kind: str, seconds: float, *, kill: bool) -> None:
    async with field.fault(name, "loop") as fault:
        jobs = await field.enqueue(kind, seconds=seconds)
        fault.jobs.update(jobs)
        owner = await field.owner_of(jobs[0])
        fault.fired = owner is not None
        if owner is not None:
            fault.pods.add(pod_of(owner))
            fault.pids.add(pid_of(owner))
        await field.ends(jobs, _END_SECONDS)
        if kill and owner is not None:
            send(pid_of(owner), signal.SIGKILL)


async def _owners_of(field: Battlefield, job: str) -> list[str]:
    query = "SELECT DISTINCT worker FROM faults.moves WHERE job_id = %s AND worker IS NOT NULL"
    return [str(row[0]) for row in await field.stores.execute(query, job)]


async def _intervene(
    field: Battlefield,
    name: str,
    statuses: list[str],
    act: Callable[[JobClient, str], Awaitable[object]],
) -> None:
    running = (
        "SELECT id::text FROM jsworker.jobs WHERE kind IN ('ordinary', 'limited') AND status = %s "
        "ORDER BY random() LIMIT %s"
    )
    async with field.fault(name, "operator") as fault, JobClient(field.settings) as client:
        for _ in range(3):
            for status in statuses:  # each by itself: in a backlog few of all would be running
                for row in await field.stores.execute(running, status, _INTERVENTIONS):
                    try:
                        await act(client, str(row[0]))
                    except JsworkerError:
                        continue  # the job was faster
                    fault.jobs.add(str(row[0]))
            await asyncio.sleep(0.5)
        fault.fired = bool(fault.jobs)


NEMESES: dict[str, Nemesis] = {
    "event_loop_block": event_loop_block,
    "gil_hold": gil_hold,
    "deaf_thread": deaf_thread,
    "quiet_phase": quiet_phase,
    "poison": poison,
    "operator_clears": operator_clears,
    "operator_cancels": operator_cancels,
    "operator_pauses": operator_pauses,
    "operator_retries": operator_retries,
    "registry_row_deleted": registry_row_deleted,
}
