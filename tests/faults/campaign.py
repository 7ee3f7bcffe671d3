"""One fault run: servers, fleet and producers up; faults; silence; collect and judge."""

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats.errors
import psycopg

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.settings import Settings
from jsworker.stream.nats_client import end_tasks
from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.checker import check
from tests.faults.collect import collect
from tests.faults.figures import figures
from tests.faults.fleet import Fleet
from tests.faults.flow_control import Watch
from tests.faults.history import History
from tests.faults.journal import Journal
from tests.faults.nemeses import CLUSTER, FAULTS_OF, KILLS, OTHERS
from tests.faults.producing import start_producer
from tests.faults.report import surroundings
from tests.faults.slowness import Slowness
from tests.faults.stores import EVERYTHING, PREFIX, STREAM, Access, Stores, new_stores
from tests.faults.workload import MOST_RUNNING

TIME_SCALE: dict[str, float] = {
    "heartbeat_interval": 0.3,
    "statement_timeout": 0.25,
    "crash_threshold": 0.9,
    "stale_threshold": 2.0,
    "scan_interval": 0.4,
    "relay_interval": 0.1,
    "ack_wait": 5.0,
    "watchdog_timeout": 1.5,
    "shutdown_timeout": 3.0,
}
"""Everything happens some twenty times faster than by default; Plan.slowed makes all of them longer."""

PATIENT = {
    "statement_timeout": 2.0,
    "heartbeat_interval": 3.0,
    "crash_threshold": 10.0,
    "stale_threshold": 20.0,
    "ack_wait": 60.0,
}
"""What the harness and the producers use instead: none of their time-outs is under test."""

EVERY_PATH = frozenset(
    {
        "claimed",
        "error",
        "failed",
        "held",
        "released",
        "fenced",
        "skipped",
        "republished",
        "retried",
        "cancel_requested",
        "cancelled",
        "rejected: complete",
        "rejected: fail",
        "reset: crashed",
        "reset: dead",
        "reset: operator",
        "reset: stale",
    }
)
"""What the timelines of a full run must tell of at least once."""

LONG_RUN_KILLS = 300
"""From so many kills on a run of every nemesis must have seen every path; a shorter one may miss some."""

_HASTEN = (
    "UPDATE jsworker.jobs SET run_at = clock_timestamp()"
    " WHERE status = 'scheduled' AND run_at IS NOT NULL AND stalls > 0"
)
_LIVE = """
SELECT (SELECT count(*) FROM jsworker.jobs WHERE finished_at IS NULL)
  + (SELECT count(*) FROM jsworker.workflows WHERE finished_at IS NULL)
  + (SELECT count(*) FROM jsworker.batches WHERE NOT propagated)
"""
_NUMBER = (
    "INSERT INTO jsworker.limits (kind, key, max_running, set_by) VALUES ('limited', %s, %s, 'operator')"
)
_ENOUGH_KILLS = 20
_WARM_UP_SECONDS = 20.0
_PRODUCERS = 2
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """What a run consists of.

    Attributes:
        seconds: length of the kill phase when ``kills`` is None; of a quiet run when there are no faults.
        kills: faults of the kill phase.
        only: names of nemeses; empty: all.
        pods, children: processes: parents, and workers of each.
        rate: jobs a second.
        drain_seconds: time for everything to end once faults are off.
        breath_seconds: time between two nemeses.
        kill_seconds: from the beginning of one kill to that of the next.
        slowed: factor for every time of TIME_SCALE; on a crowded machine no heartbeat may be late by itself.
    """

    seed: int
    seconds: float = 60.0
    kills: int | None = None
    only: tuple[str, ...] = ()
    pods: int = 2
    children: int = 2
    slots: int = 8
    rate: float = 25.0
    drain_seconds: float = 60.0
    breath_seconds: float = 2.0
    kill_seconds: float = 1.2
    slowed: float = 1.0
    cluster: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, float]:
        """The fleet's settings that are times, in seconds."""
        return {name: seconds * self.slowed for name, seconds in TIME_SCALE.items()}

    @property
    def kill_names(self) -> list[str]:
        """The nemeses of the kill phase."""
        return [name for name in KILLS if not self.only or name in self.only]

    @property
    def other_names(self) -> list[str]:
        """The nemeses that come one after another."""
        all_others = CLUSTER if self.cluster else OTHERS
        return [name for name in all_others if not self.only or name in self.only]

    @property
    def must_see(self) -> frozenset[str]:
        """Paths that must have been taken: a long run of every nemesis takes them all."""
        is_long = not self.only and not self.cluster and self.kill_count >= LONG_RUN_KILLS
        return EVERY_PATH if is_long else frozenset()

    @property
    def kill_count(self) -> int:
        """How many faults the kill phase has."""
        return self.kills if self.kills is not None else max(1, round(self.seconds / self.kill_seconds))


Progress = Callable[[str, float], None]
"""Told what happens and which share of the run is over."""


async def run(plan: Plan, folder: Path, progress: Progress, access: Access = EVERYTHING) -> dict[str, Any]:
    """Do a run and return its figures, ``ok`` for the verdict; what it recorded is in ``folder``."""
    history = History(must_fire=_must_fire(plan), must_see=plan.must_see)
    stores = new_stores(cluster=plan.cluster, access=access)
    try:
        progress("starting servers", 0.0)
        await asyncio.to_thread(stores.start)
        await _fight(plan, stores, folder, history, progress)
        collect(history, stores.admin_url, folder)
    finally:
        await asyncio.to_thread(stores.discard)
    verdict = check(history, heartbeat_interval=plan.times["heartbeat_interval"])
    planned = {
        "rate": plan.rate,
        "kill_seconds": plan.kill_seconds if plan.kill_names else None,
        "slowed": plan.slowed,
        "must_see": sorted(plan.must_see),
    }
    return {"ok": verdict.ok, **planned, "seed": plan.seed, **surroundings(), **figures(history, verdict)}


def _must_fire(plan: Plan) -> frozenset[str]:
    """Return the faults that must have struck: each nemesis, and each kill if there were enough of them."""
    kills = plan.kill_names if plan.kill_count > _ENOUGH_KILLS * len(plan.kill_names) else []
    names = {fault for name in plan.other_names for fault in FAULTS_OF.get(name, (name,))}
    return frozenset({*kills, *names})


async def _fight(plan: Plan, stores: Stores, folder: Path, history: History, progress: Progress) -> None:
    settings = fleet_settings(plan)
    access = stores.access
    outside = {**settings, **PATIENT, "nats_url": stores.nats_url}
    clients = {**outside, **access.producers, "database_url": stores.producer_url}
    own = Settings(**{**outside, **access.harness, "database_url": stores.admin_url})
    fleet = Fleet({**settings, **access.fleet}, folder, stores.database_url, stores.nats_url)
    journal = Journal(folder, "faults")
    dice = random.Random(plan.seed)  # noqa: S311 -- repeatable on purpose
    field_ = Battlefield(stores, fleet, own, clients, plan.times["stale_threshold"], folder, dice, journal)
    messages = _count_messages(stores, history)
    slowness = Slowness(stores.admin_url)
    flow = Watch(stores.execute)
    watching = [
        asyncio.create_task(messages, name="count messages"),
        asyncio.create_task(slowness.watch(), name="watch the machine"),
        asyncio.create_task(slowness.watch_processors(), name="watch the processors"),
        asyncio.create_task(flow.watch(), name="watch what flows"),
        asyncio.create_task(access.operate(stores), name="operate"),
    ]
    try:
        for key, most in MOST_RUNNING.items():
            if most is not None:
                await stores.execute(_NUMBER, key, most)
        for number in range(plan.pods):
            await fleet.add(f"pod{number}")
        await field_.until(lambda: _all_work(fleet), _WARM_UP_SECONDS)
        async with _producers(plan, stores, clients, folder):
            history.started = boottime()
            await _kill_phase(plan, field_, progress)
            await _other_phase(plan, field_, progress)
        progress("draining", 1.0)
        await asyncio.to_thread(stores.restart_all)
        history.quiet_since = boottime()
        await stores.execute("UPDATE jsworker.schedules SET paused = true")
        if await field_.until(lambda: _drained(stores), plan.drain_seconds):
            history.drained = boottime()
        await fleet.stop()
    finally:
        await end_tasks(watching)
        await asyncio.gather(*watching, return_exceptions=True)
        history.slow, history.crowded = slowness.times, slowness.crowded
        history.broken, history.idle = flow.broken, flow.idle
        await fleet.close()
        journal.close()
        history.faults = field_.faults
        history.exits = [end for pod in fleet.pods for end in pod.exits]


def fleet_settings(plan: Plan) -> dict[str, Any]:
    """Return the fleet's settings without the servers' URLs."""
    return {
        **plan.times,
        "concurrency": plan.slots,
        "processes": plan.children,
        "stream": STREAM,
        "subject_prefix": PREFIX,
        "stream_replicas": 3 if plan.cluster else 1,
        **plan.settings,
    }


async def _kill_phase(plan: Plan, field_: Battlefield, progress: Progress) -> None:
    names = plan.kill_names
    if not names:
        if not plan.other_names:
            await _stay_quiet(plan, progress)
        return
    for number in range(plan.kill_count):
        progress(f"kill {number + 1} of {plan.kill_count}", 0.8 * number / plan.kill_count)
        begun = boottime()
        await _strike(KILLS[field_.dice.choice(names)], field_)
        await asyncio.sleep(max(0.0, begun + plan.kill_seconds - boottime()))
    await asyncio.sleep(plan.breath_seconds)


async def _strike(nemesis: Nemesis, field_: Battlefield) -> None:
    """Let a nemesis act; one that could not is missed in the end, and harms no other."""
    try:
        await nemesis(field_)
    except (JsworkerError, psycopg.Error, nats.errors.Error, OSError) as error:
        field_.journal.note("failed", nemesis=str(nemesis), error=f"{type(error).__name__}: {error}"[:500])
        await asyncio.to_thread(field_.stores.restart_all)


async def _stay_quiet(plan: Plan, progress: Progress) -> None:
    begun = boottime()
    while (passed := boottime() - begun) < plan.seconds:
        progress("quiet", passed / plan.seconds)
        await asyncio.sleep(_POLL_SECONDS)


async def _other_phase(plan: Plan, field_: Battlefield, progress: Progress) -> None:
    names = plan.other_names
    field_.dice.shuffle(names)
    nemeses = CLUSTER if plan.cluster else OTHERS
    for number, name in enumerate(names):
        progress(name, 0.8 + 0.2 * number / len(names) if plan.kill_names else number / len(names))
        await _strike(nemeses[name], field_)
        await asyncio.sleep(plan.breath_seconds)


@asynccontextmanager
async def _producers(
    plan: Plan, stores: Stores, settings: dict[str, Any], folder: Path
) -> AsyncIterator[None]:
    """Let producers work during the block, then let them see through what is unclear."""
    rate = plan.rate / _PRODUCERS
    processes = [
        start_producer(folder, settings, f"p{number}", rate=rate, seed=plan.seed)
        for number in range(_PRODUCERS)
    ]
    try:
        yield
        await asyncio.to_thread(stores.restart_all)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 45.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _all_work(fleet: Fleet) -> bool:
    return all(pod.workers() for pod in fleet.pods)


async def _drained(stores: Stores) -> bool:
    """Tell whether every job and workflow has ended; none waits out minutes of back-off for many stalls."""
    await stores.execute(_HASTEN)
    return (await stores.execute(_LIVE))[0][0] == 0


async def _count_messages(stores: Stores, history: History) -> None:
    """Add up what the stream takes, over every stream that there is in turn."""
    counted: dict[Any, int] = {}
    while True:
        with suppress(Exception):  # no answer during faults; asked again
            async with stores.connected_to_nats() as connection:
                while True:
                    info = await connection.jetstream().stream_info(STREAM)
                    counted[info.created] = max(counted.get(info.created, 0), info.state.last_seq)
                    history.published = sum(counted.values())
                    await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)
