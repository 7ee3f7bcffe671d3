"""The owner's own duty: a run is stopped before others may take its job, and ends with its process."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker import heartbeat
from jsworker.worker.isolation.isolated_process import IsolatedProcess
from jsworker.worker.pipeline.in_flight import Run, StopReason
from tests.conftest import FAST
from tests.stream.nats_server import NatsServer
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker import isolated, perilous
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker
from tests.worker.tied import RecordedSupervision, tied

PACE = FAST | {
    "heartbeat_interval": 1.0,
    "statement_timeout": 0.8,
    "crash_threshold": 3.0,
    "stale_threshold": 6.0,
    "ack_wait": 15.0,
    "watchdog_timeout": 5.0,
}
"""The margin between a stop and the threshold is two heartbeats and a statement: here longer than a busy
machine keeps a process from running."""
BEAT = PACE["heartbeat_interval"]
LOOK = BEAT / 4
BY_RULE_1 = PACE["stale_threshold"] - 2 * BEAT - PACE["statement_timeout"]
BY_RULE_3 = PACE["crash_threshold"] - BEAT
BELIEVED = 2.0
SLACK_SECONDS = BY_RULE_1 - BY_RULE_3 - LOOK
"""What a look at the fence may be late on a machine that others keep busy."""


@pytest.fixture
def pace() -> dict[str, float]:
    return PACE


pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Fenced:
    """A processor's function that works until it is stopped, and notes when that was."""

    def __init__(self) -> None:
        self.stopped_at = asyncio.get_running_loop().create_future()

    async def process(self, job: Job[Any]) -> None:
        if job.cleared:
            return
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped_at.set_result(boottime())

    async def silence_at_stop(self, running: Running) -> float:
        """Return for how long the run had given no sign of life when it was stopped."""
        runs = running.worker._context.in_flight.runs.values()
        [run] = [each for each in runs if each.kind.name == "scripted"]
        async with asyncio.timeout(60):
            stopped_at: float = await self.stopped_at
        assert run.stop is StopReason.FENCED
        return stopped_at - run.beaten_at


class Stubborn:
    """A plain function that ends when the test says so, and not before."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def process(self, job: Job[Any]) -> Any:
        self.end.wait(30)
        return job.payload


@pytest.fixture
def stubborn() -> Any:
    made = Stubborn()
    yield made
    made.end.set()


async def test_without_a_database_a_run_is_stopped_before_it_is_stale(
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    make_settings: Callable[..., Settings],
    database_url: str,
) -> None:
    async with proxied(database_url) as (proxy, url):
        fenced = Fenced()
        running = await start(scripted(fenced.process), with_settings=make_settings(database_url=url))
        job = await client.enqueue("scripted", {})
        await running.events.told("job.started")
        await eventually(lambda: proves_itself(running))
        proxy.black_hole()
        silence = await fenced.silence_at_stop(running)
        print(f"fenced after {silence:.3f} s without a database")  # noqa: T201 -- a measurement for -rP
        # Long after the crash threshold: NATS is there, and two witnesses would find this worker.
        assert BY_RULE_1 <= silence < PACE["stale_threshold"]
        proxy.restore()
        await rows.becomes(job.id, "completed")
        told, *_ = timeline = await rows.timeline(job.id)
        assert [entry["event"] for entry in timeline] == ["fenced", "released", "claimed"]
        assert (told["worker_id"], told["fencing_token"]) == (running.worker.id, 1)
        row = await rows.job(job.id)
        assert (row["attempts"], row["stalls"], row["fencing_token"]) == (1, 0, 2)
        await running.worker.close()


@pytest.fixture
def _believed_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BELIEVED_SECONDS", BELIEVED)


@pytest.mark.usefixtures("_believed_for_seconds")
async def test_a_run_without_a_stale_threshold_is_stopped_before_no_answer_counts_for_it_any_more(
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    make_settings: Callable[..., Settings],
    database_url: str,
) -> None:
    async with proxied(database_url) as (proxy, url):
        fenced = Fenced()
        processor = scripted(fenced.process, stale_threshold=None)
        running = await start(processor, with_settings=make_settings(database_url=url))
        job = await client.enqueue("scripted", {})
        await running.events.told("job.started")
        await eventually(lambda: proves_itself(running))
        proxy.black_hole()
        silence = await fenced.silence_at_stop(running)
        last = PACE["crash_threshold"] + BELIEVED
        assert last - 2 * BEAT - PACE["statement_timeout"] <= silence < last + SLACK_SECONDS
        proxy.restore()
        await rows.becomes(job.id, "completed")
        await running.worker.close()


async def proves_itself(running: Running) -> None:
    assert running.worker._components.presence.reachable()


@pytest.fixture
def _only_the_fence_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "grace_heartbeats", 1000.0)


@pytest.mark.usefixtures("_only_the_fence_kills")
async def test_without_database_and_nats_a_run_is_stopped_before_witnesses_may_find_nobody(
    start: StartWorker,
    rows: Rows,
    make_settings: Callable[..., Settings],
    database_url: str,
    tmp_path: Path,
) -> None:
    server, stubborn, at_work = NatsServer(tmp_path), Stubborn(), tmp_path / "at_work"

    async def is_at_work() -> None:
        assert at_work.exists()

    async def knows_it() -> None:
        assert not running.worker._components.presence.reachable()

    await server.start()
    try:
        async with proxied(database_url) as (proxy, url):
            fenced = Fenced()
            settings = make_settings(nats_url=server.url, database_url=url)
            running = await start(
                scripted(fenced.process),
                scripted(stubborn.process, kind="plain"),
                isolated.EndlessAtFirst,
                with_settings=settings,
            )
            async with JobClient(make_settings(nats_url=server.url, statement_timeout=10.0)) as client:
                job = await client.enqueue("scripted", {})
                ignoring = [
                    (await client.enqueue(kind, {"at_work": str(at_work)})).id
                    for kind in ("plain", "endless-at-first")
                ]
                await running.events.told("job.started", times=3)
                await eventually(is_at_work)
            await eventually(lambda: proves_itself(running))
            # All of them have the same last heartbeat.
            await rounds_pass(count_rounds(running.worker._components.beats), 2)
            stopped = list(running.worker._context.in_flight.runs.values())
            await server.stop()
            await eventually(knows_it)
            proxy.black_hole()
            silence = await fenced.silence_at_stop(running)
            print(f"fenced after {silence:.3f} s without database and NATS")  # noqa: T201 -- for -rP
            assert BY_RULE_3 <= silence < BY_RULE_3 + LOOK + SLACK_SECONDS
            assert silence < BY_RULE_1
            [ignored] = await running.events.told("job.stop_ignored")
            assert (ignored["kind"], ignored["stop"]) == ("plain", "fenced")
            assert {run.grace_heartbeats for run in stopped} == {0.4, 0.2}
            assert (await running.events.told("isolated.ended"))[0]["cause"] == "stop ignored"
            stubborn.end.set()
            await server.start()
            proxy.restore()
            for job_id in (job.id, *ignoring):
                await rows.becomes(job_id, "completed")
            assert await rows.told(job.id) == ["fenced", "released", "claimed"]
            await running.worker.close()
    finally:
        stubborn.end.set()
        await server.stop()


async def test_without_nats_alone_nothing_is_stopped(
    start: StartWorker, rows: Rows, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    try:
        settings = make_settings(nats_url=server.url)
        gate = Gate()
        running = await start(scripted(gate.process), with_settings=settings)
        async with JobClient(make_settings(nats_url=server.url, statement_timeout=10.0)) as client:
            job = await client.enqueue("scripted", {})
            await gate.met()
        await server.stop()
        await running.events.told("worker.degraded")
        looks = count_rounds(running.worker._components.fences)
        await rounds_pass(looks, int(1.5 * PACE["stale_threshold"] / LOOK))
        assert not running.worker._components.presence.reachable()
        [run] = running.worker._context.in_flight.runs.values()
        assert run.stop is None
        gate.open()
        assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1
        await server.start()
        await running.stream_is_empty()
        await running.worker.close()
    finally:
        await server.stop()


@pytest.mark.usefixtures("_only_the_fence_kills")
async def test_the_fence_hurries_an_isolated_run_that_was_stopped_before(
    client: JobClient, start: StartWorker, rows: Rows, tmp_path: Path
) -> None:
    at_work = tmp_path / "at_work"

    async def is_at_work() -> None:
        assert at_work.exists()

    running = await start(isolated.EndlessAtFirst)
    job = await client.enqueue("endless-at-first", {"at_work": str(at_work)})
    await eventually(is_at_work)
    [run] = running.worker._context.in_flight.runs.values()
    run.signal(StopReason.TIMEOUT)
    await rounds_pass(count_rounds(running.worker._components.fences), 2)
    assert not running.events.of("isolated.ended")
    run.grace_heartbeats = 0.4
    run.signal(StopReason.FENCED)
    assert (await running.events.told("isolated.ended"))[0]["cause"] == "stop ignored"
    await rows.becomes(job.id, "completed")


# --- what ignores its stop ---


async def test_a_thread_that_ignores_its_stop_is_condemned_with_its_process(
    client: JobClient, settings: Settings, rows: Rows, stubborn: Stubborn
) -> None:
    swallowed = asyncio.Event()

    async def slow_to_leave(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await swallowed.wait()  # cancelled once more, it ends
            raise

    gate = Gate()
    plain = scripted(stubborn.process, kind="plain")
    coroutine = scripted(slow_to_leave, kind="coroutine")
    async with tied(plain, coroutine, scripted(gate.process), settings=settings) as (running, supervision):
        assert supervision.ids == [running.worker.id]
        culprit, slow, innocent = [
            await client.enqueue(kind, {}) for kind in ("plain", "coroutine", "scripted")
        ]
        await running.events.told("job.started", times=3)
        looks = count_rounds(running.worker._components.fences)
        await rounds_pass(looks, 4)
        assert supervision.condemned == []
        await client.cancel(culprit.id, slow.id)
        await eventually(lambda: is_condemned(supervision))
        first_cancelled_at = running.worker._context.in_flight.runs[culprit.id].first_cancelled_at
        assert first_cancelled_at is not None
        at, culprits, reason = supervision.condemned[0]
        assert at - first_cancelled_at > 2 * BEAT
        # By the first look that begins after that, however late a busy machine may be with it.
        ahead = boottime() - time.monotonic()
        assert len([end for end in looks if first_cancelled_at + 2 * BEAT < end + ahead < at]) <= 1
        await rounds_pass(looks, 4)
        assert {tuple(each) for _, found, _ in supervision.condemned for each in found} == {(culprit.id, 1)}
        assert culprits == [(culprit.id, 1)]
        assert str(culprit.id) in reason
        told = [event["job_id"] for event in running.events.of("job.stop_ignored")]
        assert told == [str(culprit.id)]  # once
        stubborn.end.set()
        swallowed.set()
        gate.open()
        await rows.becomes(innocent.id, "completed")
        await rows.becomes(slow.id, "cancelled")


async def is_condemned(supervision: RecordedSupervision) -> None:
    assert supervision.condemned


async def test_a_thread_that_is_told_to_drain_is_not_condemned(
    client: JobClient, settings: Settings, stubborn: Stubborn
) -> None:
    async with tied(scripted(stubborn.process), settings=settings) as (running, supervision):
        await client.enqueue("scripted", {})
        await running.events.told("job.started")
        [run] = running.worker._context.in_flight.runs.values()
        looks = count_rounds(running.worker._components.fences)
        run.signal(StopReason.SHUTDOWN)
        await rounds_pass(looks, 2 * 4 + 4)
        assert supervision.condemned == []
        stubborn.end.set()


async def test_a_job_in_quarantine_does_not_condemn_the_process_that_watches_it(
    client: JobClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tied(perilous.Stubborn, settings=settings) as (running, supervision):
        job = await client.enqueue("stubborn", {})
        await running.events.told("job.started")
        run = running.worker._context.in_flight.runs[job.id]

        async def timed_out() -> None:
            assert run.stop is StopReason.TIMEOUT

        with monkeypatch.context() as patch:  # else its process is ended before the fence looks
            patch.setattr(IsolatedProcess, "_request_stop", lambda *_: asyncio.Future())
            await eventually(timed_out)
            await rounds_pass(count_rounds(running.worker._components.fences), 2 * 4 + 4)
        assert supervision.condemned == []
        assert running.worker._context.in_flight.runs == {job.id: run}


async def test_the_end_of_the_last_quiet_phase_is_announced(client: JobClient, settings: Settings) -> None:
    announced: list[float] = []
    gate = Gate()

    async def be_quiet(job: Job[Any]) -> None:
        before = boottime()
        await job.quiet(job.payload["seconds"])
        announced.append(before + job.payload["seconds"])
        await gate.process(job)

    async with tied(scripted(be_quiet), scripted(echo, kind="echo"), settings=settings) as (
        running,
        supervision,
    ):
        for place, seconds in enumerate((100.0, 40.0, 0.0), start=1):
            await client.enqueue("scripted", {"seconds": seconds})
            await gate.met()
            assert len(supervision.quiet) == place
            # Others' phases are not cut short by a shorter one.
            assert announced[0] <= supervision.quiet[-1] < announced[0] + 5
        gate.open()
        await running.events.told("job.completed", times=3)


async def test_a_quiet_phase_ends_with_its_run(client: JobClient, settings: Settings) -> None:
    """Else nobody would see that the event loop hangs in another job."""

    async def be_quiet(job: Job[Any]) -> None:
        await job.quiet(job.payload["seconds"])
        await gate.process(job)

    async def leave(job: Job[Any]) -> None:
        await job.quiet(3600.0)

    gate = Gate()
    async with tied(scripted(be_quiet), scripted(leave, kind="leave"), settings=settings) as (
        running,
        supervision,
    ):
        await client.enqueue("scripted", {"seconds": 100.0})
        await gate.met()
        longest = supervision.quiet[-1]
        await client.enqueue("leave", {})
        await running.events.told("job.completed")
        assert supervision.quiet[-2] > longest
        assert supervision.quiet[-1] == longest
        gate.open()
        await running.events.told("job.completed", times=2)
        assert supervision.quiet[-1] < boottime()
