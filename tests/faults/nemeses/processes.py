"""Processes that are killed or stopped, and hosts with the same name."""

import asyncio
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from jsworker.core.clock import boottime
from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.fleet import Pod, is_alive, process_state, send
from tests.faults.journal import read_journal

POINTS = (
    "after_claim_before_run",
    "after_process_before_settle",
    "after_settle_before_ack",
    "after_publish_before_mark",
)
"""Fault points of the main way at which workers are killed."""

_STRIKE_SECONDS = 60.0
"""Behind a deep backlog; one of four relays publishes what is due."""
_DOOMED = 60
_RESET_THRESHOLDS = 8
"""Stale thresholds within which somebody takes jobs from a frozen worker: three on an idle machine."""
_HELD_JOBS = 40
_HELD_SECONDS = 3.0
_STAYS_DOWN_SECONDS = 6.0
_START_SECONDS = 40.0
_TWIN_SECONDS = 6.0
_REPLACED_SECONDS = 20.0
_BUSY_RATE = 1200
_BUSY_SECONDS = 8
_BUSY_END_SECONDS = 240.0
_DEATH_SECONDS = 2.0


async def kill_child(field: Battlefield) -> None:
    """SIGKILL one worker process; its parent lives."""
    pod, victim = await field.victim()
    async with field.fault("sigkill_child", "process", pods=[pod], pids=[victim]) as fault:
        fault.fired = send(victim, signal.SIGKILL)
    await field.until(partial(_are_gone, [victim]), _DEATH_SECONDS)


async def kill_parent(field: Battlefield) -> None:
    """SIGKILL the parent alone: its children must end by themselves."""
    pod = await field.working_pod()
    tree = pod.tree()
    async with field.fault("sigkill_parent", "process", pods=[pod], pids=tree) as fault:
        fault.fired = pod.parent is not None and send(pod.parent, signal.SIGKILL)
    await field.until(partial(_are_gone, tree), _DEATH_SECONDS)


async def kill_both(field: Battlefield) -> None:
    """SIGKILL parent and children at once; the pod comes back on the same hostname."""
    pod = await field.working_pod()
    tree = pod.tree()
    async with field.fault("sigkill_both", "process", pods=[pod], pids=tree) as fault:
        fault.fired = _kill_tree(pod)
    await field.until(partial(_are_gone, tree), _DEATH_SECONDS)


async def kill_busy_pod(field: Battlefield) -> None:
    """SIGKILL a pod again and again while 1,200 jobs a second come."""
    # So much work that PostgreSQL answers late, in the time scale of a fault run.
    async with field.fault("busy_pod", "messages", "database") as fault:
        jobs: list[str] = []
        for second in range(_BUSY_SECONDS):
            began = boottime()
            jobs += await field.enqueue("ordinary", count=_BUSY_RATE, seconds=0.0)
            if second % 2:
                await kill_both(field)
            await asyncio.sleep(max(0.0, began + 1.0 - boottime()))
        fault.fired = True  # what becomes of the jobs, the checker tells
        await field.ends(jobs, _BUSY_END_SECONDS)


async def kill_for_good(field: Battlefield) -> None:
    """SIGKILL a whole pod that stays away: only others can tell that it is dead."""
    pod = await field.working_pod()
    async with field.fault("sigkill_not_restarted", "process", pods=[pod], pids=pod.tree()) as fault:
        pod.wanted = False
        fault.fired = _kill_tree(pod)
    await asyncio.sleep(_STAYS_DOWN_SECONDS)
    pod.wanted = True


async def kill_for_good_without_nats(field: Battlefield) -> None:
    """The same while NATS is down: nobody can be asked, and the stale threshold decides."""
    pod = await field.working_pod()
    async with field.fault("nats_down_meanwhile", "nats"):
        await asyncio.to_thread(field.stores.nats.kill)
        try:
            async with field.fault("sigkill_without_nats", "process", pods=[pod], pids=pod.tree()) as fault:
                pod.wanted = False
                fault.fired = _kill_tree(pod)
            await asyncio.sleep(_STAYS_DOWN_SECONDS)
        finally:
            await asyncio.to_thread(field.stores.nats.start)
    pod.wanted = True


async def stop_long(field: Battlefield) -> None:
    """SIGSTOP past the stale threshold: a zombie wakes up."""
    await _freeze(field, "sigstop_past_threshold", 2 * field.stale_seconds)


async def stop_short(field: Battlefield) -> None:
    """SIGSTOP for half the stale threshold: nobody may take it for stale."""
    await _freeze(field, "sigstop_half_threshold", 0.5 * field.stale_seconds)


async def stop_before_settle(field: Battlefield) -> None:
    """SIGSTOP between the end of the work and the statement that settles it, past the threshold."""
    await _stop_before_settle(field)
    await field.enqueue("doomed", count=_DOOMED)  # so that it most likely is a FAIL that comes too late
    await _stop_before_settle(field)


async def _stop_before_settle(field: Battlefield) -> None:
    pod, victim = await field.victim()
    async with field.fault("sigstop_before_settle", "process", pods=[pod], pids=[victim]) as fault:
        order = field.folder / f"strike-{victim}"
        order.write_text(f"after_process_before_settle {int(signal.SIGSTOP)}")
        fault.fired = await field.until(lambda: _is_stopped(victim), 5.0)
        await asyncio.sleep(1.5 * field.stale_seconds)
        send(victim, signal.SIGCONT)
        order.unlink(missing_ok=True)
        await asyncio.sleep(0.5)


async def kill_at_points(field: Battlefield) -> None:
    """SIGKILL at each fault point of the main way."""
    for point in POINTS:
        pod, victim = await field.victim()
        async with field.fault(f"killed_{point}", "process", pods=[pod], pids=[victim]) as fault:
            order = field.folder / f"strike-{victim}"
            order.write_text(f"{point} {int(signal.SIGKILL)}")
            relayed = point == "after_publish_before_mark"
            await field.until(partial(_is_struck, field, victim, relayed), _STRIKE_SECONDS)
            order.unlink(missing_ok=True)
            if is_alive(victim):  # it may have the order already, and would obey it some time later
                send(victim, signal.SIGKILL)
                await field.until(partial(_are_gone, [victim]), _DEATH_SECONDS)
            fault.fired = has_obeyed(field.folder, [victim], point)


async def kill_after_reset(field: Battlefield) -> None:
    """SIGKILL of whoever has just taken jobs from a frozen worker, before anybody is woken for them."""
    await field.enqueue(
        "ordinary", count=_HELD_JOBS, seconds=_HELD_SECONDS
    )  # so that the frozen one owns some
    _, frozen = await field.victim()
    rescuers = [pid for each in field.fleet.pods for pid in each.workers() if pid != frozen]
    orders = [field.folder / f"strike-{pid}" for pid in rescuers]
    point = "after_reset_before_wake"
    async with field.fault(f"killed_{point}", "process", pids=[frozen, *rescuers]) as fault:
        for order in orders:
            order.write_text(f"{point} {int(signal.SIGKILL)}")
        send(frozen, signal.SIGSTOP)
        await field.until(partial(_is_any_gone, rescuers), _RESET_THRESHOLDS * field.stale_seconds)
        send(frozen, signal.SIGCONT)
        for order in orders:
            order.unlink(missing_ok=True)
        # Those that have taken the order already obey it at their next reset.
        for each in field.fleet.pods:
            each.kill_all()
        await field.until(partial(_are_gone, [frozen, *rescuers]), _DEATH_SECONDS)
        fault.fired = has_obeyed(field.folder, rescuers, point)


async def twin_hostname(field: Battlefield) -> None:
    """A second pod with a live pod's hostname: overlapping pods of a StatefulSet."""
    pod = await field.working_pod()
    async with field.fault("twin_hostname", "twin", pods=[pod]) as fault:
        twin = await field.fleet.add(pod.hostname)
        fault.fired = await field.until(lambda: _works(twin), _START_SECONDS)
        await asyncio.sleep(_TWIN_SECONDS / 2)
        async with field.fault("sigterm", "process", pods=[twin], pids=twin.tree()):
            await twin.stop()
        field.fleet.pods.remove(twin)


async def rolling_restart(field: Battlefield) -> None:
    """SIGTERM one pod after the other, as a deployment does."""
    for pod in list(field.fleet.pods):
        async with field.fault("sigterm", "process", pods=[pod], pids=pod.tree()):
            await pod.stop()
            pod.wanted = True
            await field.until(partial(_works, pod), _START_SECONDS)


async def output_not_read(field: Battlefield) -> None:
    """Nobody reads what a pod writes, and the pipe is full: a killed worker must be replaced all the same."""
    pod, victim = await field.victim()
    before = set(pod.workers())
    async with field.fault("output_not_read", "process", pods=[pod], pids=[victim]) as fault:
        assert pod.output is not None
        with pod.output.unread():
            send(victim, signal.SIGKILL)
            fault.fired = await field.until(partial(_has_others_than, pod, before), _REPLACED_SECONDS)


async def _freeze(field: Battlefield, name: str, seconds: float) -> None:
    pod, victim = await field.victim()
    async with field.fault(name, "process", pods=[pod], pids=[victim]) as fault:
        fault.fired = send(victim, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        send(victim, signal.SIGCONT)


def _kill_tree(pod: Pod) -> bool:
    tree = pod.tree()
    sent = [send(pid, signal.SIGKILL) for pid in tree]
    return bool(sent) and all(sent)


async def _works(pod: Pod) -> bool:
    return bool(pod.workers())


async def _has_others_than(pod: Pod, pids: set[int]) -> bool:
    return bool(set(pod.workers()) - pids)


async def _is_stopped(pid: int) -> bool:
    return process_state(pid) == "T"


async def _is_any_gone(pids: Iterable[int]) -> bool:
    return not all(is_alive(pid) for pid in pids)


async def _is_struck(field: Battlefield, victim: int, relayed: bool) -> bool:  # noqa: FBT001 -- of a partial
    """Tell whether a worker is gone; meanwhile leave jobs to the relays, of which it has one of four."""
    if relayed:
        await field.enqueue("ordinary", published=False, seconds=0.1)
    return not is_alive(victim)


def has_obeyed(folder: Path, pids: Iterable[int], point: str) -> bool:
    """Tell from their own records whether any of these processes struck itself at a fault point."""
    return any(
        line["what"] == "struck" and line["point"] == point
        for pid in pids
        for path in folder.glob(f"run-{pid}-*.jsonl")
        for line in read_journal(path)
    )


async def _are_gone(pids: Iterable[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


KILLS: dict[str, Nemesis] = {
    "sigkill_child": kill_child,
    "sigkill_parent": kill_parent,
    "sigkill_both": kill_both,
}

OTHERS: dict[str, Nemesis] = {
    "sigkill_not_restarted": kill_for_good,
    "busy_pod": kill_busy_pod,
    "sigkill_without_nats": kill_for_good_without_nats,
    "sigstop_past_threshold": stop_long,
    "sigstop_half_threshold": stop_short,
    "sigstop_before_settle": stop_before_settle,
    "killed_at_points": kill_at_points,
    "killed_after_reset_before_wake": kill_after_reset,
    "twin_hostname": twin_hostname,
    "rolling_restart": rolling_restart,
    "output_not_read": output_not_read,
}
