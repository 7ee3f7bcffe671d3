"""Isolated kinds: their jobs run in warm processes of the worker, and what those do harms nobody else."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import psutil
import pytest

from jsworker import JobClient
from jsworker.core.errors import InvalidTarget, SettingsError
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, variable_of
from jsworker.worker.isolation import resident_memory
from jsworker.worker.isolation.resident_memory import resident_bytes
from jsworker.worker.pipeline import settling
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.worker import SetupFailed, Worker
from tests.support.polling import eventually
from tests.worker.isolated import (
    Frugal,
    Huge,
    Isolated,
    Leaky,
    LeavesOpen,
    Loaded,
    LoadedToo,
    Other,
    Rotating,
    Steady,
    Stubborn,
    Unready,
    WithoutThreads,
)
from tests.worker.isolated_processes import children, nothing_is_left
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

PATIENT = {"statement_timeout": 5.0, "heartbeat_interval": 6.0}
"""For jobs that write from their own process, where ``patient`` does not reach."""

STARTED = 180.0
"""Seconds that a busy machine may take to start a process, and to do a job in it."""

Processors = JobProcessor[Any] | type[JobProcessor[Any]]


@pytest.fixture
def begin(start: StartWorker, make_settings: Callable[..., Settings]) -> Callable[..., Any]:
    """Start a worker that waits for its isolated processes as long as a busy machine needs."""

    async def begin(*processors: Processors, processes: int = 1, **changes: Any) -> Running:
        settings = make_settings(isolated_processes=processes, **({"shutdown_timeout": 60.0} | changes))
        return await start(*processors, with_settings=settings)

    return begin


async def result_of(client: JobClient, rows: Rows, kind: str = "isolated", **payload: Any) -> Any:
    job = await client.enqueue(kind, {"does": "return"} | payload)
    return (await rows.becomes(job.id, "completed", seconds=STARTED))["result"]


# --- Warm processes. ---


async def test_jobs_run_in_a_warm_process_that_is_set_up_once_and_torn_down(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORN_DOWN", str(tmp_path))
    running = await begin(Isolated)
    [child] = children()
    found = [await result_of(client, rows, value=n) for n in range(3)]
    assert found == [{"pid": child.pid, "setups": 1, "found": n} for n in range(3)]
    assert Isolated.setups == 0  # here
    assert [event["quarantined"] for event in running.events.of("job.started")] == [False] * 3
    await running.worker.close()
    assert children() == []
    assert os.listdir(tmp_path) == [str(child.pid)]  # noqa: PTH208 -- names


async def test_a_process_serves_all_isolated_kinds(begin: Any, client: JobClient, rows: Rows) -> None:
    await begin(Isolated, Other)
    found = [await result_of(client, rows, kind) for kind in ("isolated", "other-isolated", "isolated")]
    assert len({each["pid"] for each in found}) == 1
    looked = await result_of(client, rows, does="look_at_the_collector")
    assert looked["found"] == [True, True]  # behind the modules, which are loaded without it
    # Both are subclasses of one class, which counts.
    assert [each["setups"] for each in found] == [2, 2, 2]


async def test_no_more_jobs_are_claimed_than_there_are_processes(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    running = await begin(Isolated, Other, scripted(echo), processes=2)
    until = str(tmp_path / "go")
    for kind in ("isolated", "other-isolated"):
        await client.enqueue_many(kind, [{"does": "wait_for_file", "until": until}] * 3)
    await running.events.told("job.started", times=2)
    processing = "SELECT count(*) FROM jsworker.jobs WHERE status = 'processing'"
    for n in range(20):  # each of them makes room and has all kinds asked for anew
        neighbour = await client.enqueue("scripted", {"n": n})
        await rows.becomes(neighbour.id, "completed")
        assert await rows.value(processing) <= 2
    assert len(children()) == 2
    (tmp_path / "go").touch()

    async def all_done() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'") == 26

    await eventually(all_done)


async def test_a_process_is_replaced_after_its_number_of_jobs(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    running = await begin(Rotating)
    found = [await result_of(client, rows, "rotating") for _ in range(5)]
    pids = [each["pid"] for each in found]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    assert {each["setups"] for each in found} == {1}
    ended = await running.events.told("isolated.ended", times=2)
    assert [(event["cause"], event["jobs"], event["pid"]) for event in ended] == [
        ("jobs", 2, pids[0]),
        ("jobs", 2, pids[2]),
    ]


@pytest.mark.parametrize("free", [0, 5])
async def test_a_process_whose_files_its_jobs_have_used_up_is_replaced(
    begin: Any, client: JobClient, rows: Rows, free: int
) -> None:
    """``free``: a job that needs more files than are left would fail, and close those that it opened."""
    running = await begin(LeavesOpen, Isolated)
    job = await client.enqueue("leaves-open", {"free": free})
    left_open = (await rows.becomes(job.id, "completed", seconds=STARTED))["result"]
    assert (await result_of(client, rows))["pid"] != left_open
    [ended] = await running.events.told("isolated.ended")
    assert (ended["cause"], ended["pid"]) == ("files", left_open)


async def test_a_process_that_starts_no_more_threads_is_replaced(
    begin: Any, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_FIRST_PAUSE_SECONDS", 60.0)  # for so long it is seen to wait
    running = await begin(WithoutThreads)
    job = await client.enqueue("without-threads", {"uses_up": True})
    used_up = (await rows.becomes(job.id, "completed", seconds=STARTED))["result"]
    finds_out = await client.enqueue("without-threads", {})
    row = await rows.becomes(finds_out.id, "scheduled")
    assert (row["attempts"], row["errors"], row["stalls"]) == (0, 0, 0)
    job = await client.enqueue("without-threads", {})
    assert (await rows.becomes(job.id, "completed", seconds=STARTED))["result"] != used_up
    [ended] = await running.events.told("isolated.ended")
    assert (ended["cause"], ended["pid"]) == ("threads", used_up)


async def test_an_idle_process_that_dies_is_replaced(begin: Any, client: JobClient, rows: Rows) -> None:
    running = await begin(Isolated)
    before = await result_of(client, rows)
    psutil.Process(before["pid"]).kill()
    [ended] = await running.events.told("isolated.ended")
    assert ended["cause"] == "crashed"
    job = await client.enqueue("isolated", {"does": "return"})
    row = await rows.becomes(job.id, "completed")
    assert row["result"]["pid"] != before["pid"]
    assert (row["errors"], row["stalls"], row["fencing_token"]) == (0, 0, 1)


async def test_a_signal_to_its_process_group_does_not_reach_the_worker(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    await begin(Isolated, **PATIENT)
    row = await rows.becomes((await client.enqueue("isolated", {"does": "signal_its_group"})).id, "completed")
    assert row["result"]["found"] is True
    after = await result_of(client, rows)
    assert after["pid"] == row["result"]["pid"]


# --- What a job can do in its worker's process, it can do there. ---


async def test_progress_checkpoint_steps_sleep_and_its_own_transaction(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    running = await begin(Isolated, **PATIENT)
    job = await client.enqueue("isolated", {"does": "report"})
    row = await rows.becomes(job.id, "completed")
    assert (row["stage"], row["progress"], row["checkpoint"]) == ("apart", 0.5, {"seen": None})
    assert row["result"]["found"] == row["result"]["pid"] != os.getpid()
    [progress], [step] = running.events.of("job.progress"), running.events.of("job.step")
    assert (progress["job_id"], progress["stage"], step["step"]) == (str(job.id), "apart", "pid")

    job = await client.enqueue("isolated", {"does": "sleep"})
    await running.events.told("job.snoozed")
    row = await rows.becomes(job.id, "completed")
    assert (row["result"]["found"], row["errors"]) == ("slept", 0)

    job = await client.enqueue("isolated", {"does": "complete"})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"by": "its transaction"}
    assert await rows.value("SELECT count(*) FROM effects") == 0
    await running.events.told("job.completed", times=3)
    assert (await result_of(client, rows))["setups"] == 1  # in the same process


async def test_a_quiet_phase(begin: Any, client: JobClient, rows: Rows) -> None:
    await begin(Isolated, watchdog_timeout=1.5, **PATIENT)
    job = await client.enqueue("isolated", {"does": "be_quiet"})
    row = await rows.becomes(job.id, "completed")
    assert (row["fencing_token"], row["stalls"]) == (1, 0)


async def test_progress_is_a_sign_of_life_for_the_owner_at_once(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    """Its process tells between two ticks, which are further apart than the job may be silent."""
    await begin(Steady, watchdog_timeout=55.0, **PATIENT)
    job = await client.enqueue("steady", {})
    await rows.becomes(job.id, "completed")


async def test_an_error_arrives_with_its_traceback_and_what_is_logged_with_its_job(
    begin: Any, client: JobClient, rows: Rows, capfd: pytest.CaptureFixture[str]
) -> None:
    await begin(Isolated)
    job = await client.enqueue("isolated", {"does": "raise"})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["errors"], row["stalls"]) == (1, 0)
    assert row["last_error"].startswith("ValueError: raised in isolation")
    assert "in _raise" in row["last_error"]
    job = await client.enqueue("isolated", {"does": "log"})
    await rows.becomes(job.id, "completed")
    written = ""

    async def is_written() -> None:
        nonlocal written
        written += capfd.readouterr().err
        lines = [each for each in written.splitlines() if "logged in isolation" in each]
        assert len(lines) == 1
        assert str(job.id) in lines[0]

    await eventually(is_written)


async def test_results_and_payloads_of_a_megabyte(begin: Any, client: JobClient, rows: Rows) -> None:
    running = await begin(Isolated)
    value = "\u2028" * 300_000  # nine hundred thousand bytes
    assert (await result_of(client, rows, value=value))["found"] == value
    job = await client.enqueue("isolated", {"does": "return", "value": value[:200_000]})
    await rows.becomes(job.id, "completed")
    assert running.events.of("isolated.ended") == []


async def test_cancelled_and_lost_jobs_are_stopped_there_and_their_process_goes_on(
    begin: Any, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "grace_heartbeats", 1000.0)  # a busy machine is slow to stop a job there
    running = await begin(Isolated)
    pid = (await result_of(client, rows))["pid"]
    job = await client.enqueue("isolated", {"does": "wait"})
    await running.events.told("job.started", times=2)
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    job = await client.enqueue("isolated", {"does": "wait"})
    await running.events.told("job.started", times=3)
    await rows.take_back(job.id)
    await running.events.told("job.lost")
    assert (await result_of(client, rows))["pid"] == pid


async def test_it_is_told_of_a_drain(begin: Any, client: JobClient, rows: Rows) -> None:
    running = await begin(Isolated)
    job = await client.enqueue("isolated", {"does": "wait_to_be_told"})
    await running.events.told("job.started")
    assert await running.worker.close() == 0
    assert (await rows.job(job.id))["status"] == "completed"


async def test_a_forced_end_hands_it_back_and_kills_what_has_timed_out(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "grace_heartbeats", 1000.0)
    running = await begin(Isolated, Stubborn, processes=3, heartbeat_interval=3.0, statement_timeout=2.0)
    stubborn = await client.enqueue("stubborn-isolated", {"does": "loop"})
    jobs = [
        await client.enqueue("isolated", {"does": does, "until": str(tmp_path / "never")})
        for does in ("wait", "compute")
    ]
    await running.events.told("job.started", times=3)
    run = running.worker._context.in_flight.runs[stubborn.id]

    async def timed_out() -> None:
        assert run.stop is StopReason.TIMEOUT

    await eventually(timed_out)
    assert await running.worker.close(force=True) == 0
    for job in jobs:
        row = await rows.job(job.id)
        assert (row["status"], row["attempts"], row["stalls"]) == ("queued", 0, 0)
    assert (await rows.job(stubborn.id))["last_error"].startswith("timed out after 1 s")
    assert children() == []


# --- What one job does harms no other. ---


async def test_jobs_that_compute_hold_up_no_coroutines(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    running = await begin(Isolated, scripted(echo), processes=2)
    until = str(tmp_path / "go")
    computing = [await client.enqueue("isolated", {"does": "compute", "until": until}) for _ in range(2)]
    await running.events.told("job.started", times=2)
    beside = [await client.enqueue("scripted", {"n": n}) for n in range(20)]
    for job in beside:
        await rows.becomes(job.id, "completed")
    assert [(await rows.job(job.id))["status"] for job in computing] == ["processing"] * 2
    (tmp_path / "go").touch()
    for job in computing:
        await rows.becomes(job.id, "completed")


async def stall_of(running: Running, job_id: UUID) -> dict[str, Any]:
    async def found() -> dict[str, Any]:
        of_job = [event for event in running.events.of("job.stalled") if event["job_id"] == str(job_id)]
        assert of_job
        return of_job[0]

    return await eventually(found)


async def test_a_job_that_ends_its_process_stalls_alone(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    running = await begin(Isolated, processes=2)
    until = str(tmp_path / "go")
    beside = await client.enqueue("isolated", {"does": "wait_for_file", "until": until})
    await running.events.told("job.started")
    pids = {(await result_of(client, rows))["pid"]}
    ways = [
        ("segfault", "was killed by SIGSEGV"),
        ("exit", "ended with exit code 3"),
        ("be_killed", "was killed by SIGKILL"),
        ("close_its_files", ""),
        ("write_to_its_link", "it sent to the worker what is no message"),
        ("break_its_report", "ended with exit code 1"),
    ]
    for does, how in ways:
        job = await client.enqueue("isolated", {"does": does})
        row = await rows.becomes(job.id, "scheduled", seconds=STARTED)
        assert (row["errors"], row["stalls"]) == (0, 1), does
        assert row["last_error"].startswith("the process in which the job ran ")
        assert how in row["last_error"]
        assert (await stall_of(running, job.id))["cause"] == "crashed in isolation"
        await client.cancel(job.id)  # else it runs again beside the next ones
        found = await result_of(client, rows)
        assert found["setups"] == 1
        assert found["pid"] not in pids, does  # a new process
        pids.add(found["pid"])
    (tmp_path / "go").touch()
    row = await rows.becomes(beside.id, "completed", seconds=STARTED)
    assert (row["fencing_token"], row["stalls"]) == (1, 0)


async def test_the_end_of_a_process_is_seen_where_the_system_has_no_pidfd(
    begin: Any, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    await begin(Isolated)
    job = await client.enqueue("isolated", {"does": "exit"})
    row = await rows.becomes(job.id, "scheduled", seconds=STARTED)
    assert row["stalls"] == 1
    assert "ended with exit code 3" in row["last_error"]


async def test_sys_exit_is_an_error_of_the_job_alone(begin: Any, client: JobClient, rows: Rows) -> None:
    await begin(Isolated)
    pid = (await result_of(client, rows))["pid"]
    job = await client.enqueue("isolated", {"does": "leave_by_sys_exit"})
    row = await rows.becomes(job.id, "scheduled", seconds=STARTED)
    assert (row["errors"], row["stalls"]) == (1, 0)
    assert (await result_of(client, rows))["pid"] == pid


async def test_code_that_ignores_its_time_out_is_killed(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    running = await begin(Stubborn, Isolated, processes=2)
    until = str(tmp_path / "go")
    beside = await client.enqueue("isolated", {"does": "wait_for_file", "until": until})
    await running.events.told("job.started")
    for does in ("loop", "match"):
        job = await client.enqueue("stubborn-isolated", {"does": does})
        row = await rows.becomes(job.id, "failed", seconds=STARTED)
        assert (row["failure_reason"], row["errors"], row["stalls"]) == ("attempts", 1, 0), does
        assert row["last_error"] == (
            "timed out after 1 s; the process in which the job ran was killed by SIGKILL: "
            "it went on although it was told to stop: timeout"
        )

        async def hook_is_told(job_id: UUID = job.id, error: str = row["last_error"]) -> None:
            assert job_id in Stubborn.failed
            told = Stubborn.failed[job_id]
            assert (type(told), str(told)) == (TimeoutError, error)

        await eventually(hook_is_told)
    job = await client.enqueue("stubborn-isolated", {"does": "nothing"})
    await rows.becomes(job.id, "completed", seconds=STARTED)
    (tmp_path / "go").touch()
    assert (await rows.becomes(beside.id, "completed", seconds=STARTED))["fencing_token"] == 1


async def test_a_process_whose_event_loop_hangs_is_killed(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    await begin(Isolated, watchdog_timeout=1.5)
    job = await client.enqueue("isolated", {"does": "compute", "until": str(tmp_path / "never")})
    row = await rows.becomes(job.id, "scheduled", seconds=STARTED)
    assert (row["errors"], row["stalls"]) == (0, 1)
    assert "has not ticked for 1.5 s" in row["last_error"]


async def test_a_process_that_stood_still_with_its_owner_is_not_taken_for_hung(
    begin: Any, client: JobClient, rows: Rows, tmp_path: Path
) -> None:
    """As on a machine that was suspended."""
    running = await begin(Isolated, watchdog_timeout=3.0, **PATIENT)
    until = tmp_path / "go"
    job = await client.enqueue("isolated", {"does": "wait_for_file", "until": str(until)})
    await running.events.told("job.started")
    [child] = children()
    child.suspend()

    async def stands_still() -> None:
        assert child.status() == psutil.STATUS_STOPPED

    await eventually(stands_still)
    await asyncio.sleep(0.1)  # what it had sent before is read
    time.sleep(4.0)  # noqa: ASYNC251 -- the owner's event loop stands still, too
    await asyncio.sleep(0.3)  # the owner happens to wake first
    child.resume()
    until.touch()
    assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1


async def test_a_leaking_kind_costs_its_innocent_neighbours_nothing(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    running = await begin(Leaky, Isolated, scripted(echo), processes=2)
    leaky = [await client.enqueue("leaky", {}) for _ in range(8)]
    innocent = [
        await client.enqueue(kind, {"does": "return"}) for _ in range(15) for kind in ("isolated", "scripted")
    ]
    found = [await rows.becomes(job.id, "completed", seconds=STARTED) for job in (*leaky, *innocent)]
    assert {(row["attempts"], row["errors"], row["stalls"]) for row in found} == {(1, 0, 0)}
    started = Counter(event["job_id"] for event in running.events.of("job.started"))
    assert started == {str(job.id): 1 for job in (*leaky, *innocent)}
    assert len({row["result"] for row in found[:8]}) > 1
    ended = running.events.of("isolated.ended")
    assert {event["cause"] for event in ended} == {"memory"}
    assert all(250e6 < event["memory_bytes"] < 500e6 for event in ended)


async def test_at_twice_its_memory_a_process_is_killed_and_its_job_stalls(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    running = await begin(Leaky)
    job = await client.enqueue("leaky", {"times": 20})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["errors"], row["stalls"]) == (0, 1)
    assert "MB, more than twice max_memory_mb=250" in row["last_error"]
    [ended] = await running.events.told("isolated.ended")
    assert ended["cause"] == "memory exceeded"
    job = await client.enqueue("leaky", {})
    await rows.becomes(job.id, "completed")


@pytest.mark.parametrize("has_proc", [True, False], ids=["by proc", "by ps"])
def test_memory_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_proc: bool) -> None:
    if not has_proc:
        monkeypatch.setattr(resident_memory, "PROC", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        found = resident_bytes([os.getpid(), other.pid])
        own = psutil.Process().memory_info().rss
        assert 0.5 * own < found[os.getpid()] < 2 * own
        assert other.pid in found
        other.communicate(b"\n")
    assert resident_bytes([other.pid]) == resident_bytes([]) == {}


# --- Processes that cannot be made ready. ---


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raises", "setup of kind unready (Unready) raised ConnectionError: no model server"),
        ("exits", "ended with exit code 4 before the job began"),
    ],
)
async def test_setup_that_fails_at_the_start_ends_it(
    begin: Any, monkeypatch: pytest.MonkeyPatch, does: str, why: str
) -> None:
    monkeypatch.setenv("UNREADY", does)
    with pytest.raises(SetupFailed) as raised:
        await begin(Unready)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)
    await nothing_is_left()


async def test_a_process_that_the_system_cannot_start_at_the_start_ends_it_in_one_line(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as at the limit of processes

    monkeypatch.setattr("jsworker.worker.isolation.isolated_process.subprocess.Popen", no_process)
    with pytest.raises(SetupFailed, match="could not be started: BlockingIOError: ") as raised:
        await begin(Isolated)
    assert "\n" not in str(raised.value)
    assert children() == []


async def test_setup_that_fails_later_is_no_error_of_the_job(
    begin: Any, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await begin(Unready)
    first = await client.enqueue("unready", {})
    await rows.becomes(first.id, "completed")
    for number, does in enumerate(("raises", "exits"), 1):
        monkeypatch.setenv("UNREADY", does)
        job = await client.enqueue("unready", {})
        degraded = await running.events.told("worker.degraded", times=number)
        assert degraded[-1]["what"] == "isolated processes"
        monkeypatch.setenv("UNREADY", "")
        row = await rows.becomes(job.id, "completed")
        assert (row["errors"], row["stalls"], row["attempts"]) == (0, 0, 1)
        await running.events.told("worker.restored", times=number)
        await nothing_is_left()  # one job for each process


async def test_a_job_is_cancelled_while_its_process_is_made_ready(
    begin: Any, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await begin(Unready)
    first = await client.enqueue("unready", {})
    await rows.becomes(first.id, "completed")
    monkeypatch.setenv("UNREADY", "waits")
    job = await client.enqueue("unready", {})
    await running.events.told("job.started", times=2)
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    await nothing_is_left()
    assert [event["cause"] for event in running.events.of("isolated.ended")] == ["jobs"]
    monkeypatch.setenv("UNREADY", "")
    again = await client.enqueue("unready", {})
    await rows.becomes(again.id, "completed")


async def test_a_limit_of_memory_below_what_a_process_needs_is_refused_at_the_start(begin: Any) -> None:
    with pytest.raises(SetupFailed, match="max_memory_mb=5 of kind huge must be more"):
        await begin(Huge)


async def test_a_kind_whose_own_processor_would_fit_alone_gets_a_process_of_its_own(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    """What another kind has left in the only process there is does not count against it."""
    running = await begin(Leaky, Frugal)
    before = await result_of(client, rows, "frugal")
    job = await client.enqueue("leaky", {})
    leaked = (await rows.becomes(job.id, "completed"))["result"]
    assert before["pid"] == leaked
    assert (await result_of(client, rows, "frugal"))["pid"] != leaked
    [ended] = await running.events.told("isolated.ended")
    assert (ended["cause"], ended["pid"]) == ("memory", leaked)


async def test_kinds_that_do_not_fit_into_one_process_keep_warm_ones_of_their_own(
    begin: Any, client: JobClient, rows: Rows
) -> None:
    running = await begin(Loaded, LoadedToo, processes=2)
    found = [await result_of(client, rows, kind) for _ in range(4) for kind in ("loaded", "loaded-too")]
    assert found == [*found[:2]] * 4
    assert len({pid for pid, _ in found}) == 2
    assert running.events.of("isolated.ended") == []


# --- The end of the worker's process. ---


async def test_no_process_outlives_its_worker(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(isolated_processes=2, processes=1, **PATIENT)
    environment = {variable_of(name): str(getattr(settings, name)) for name in settings.model_fields_set}
    targets = ["tests.worker.isolated:Stubborn", "tests.worker.isolated:Isolated"]
    command = [sys.executable, "-m", "jsworker", "run", *targets]
    for kind, does in (("isolated", "wait"), ("stubborn-isolated", "match")):
        await client.enqueue(kind, {"does": does})
    with subprocess.Popen(command, env={**os.environ, **environment}) as supervisor:  # noqa: ASYNC220 -- starts at once

        async def family() -> tuple[psutil.Process, list[psutil.Process]]:
            workers = psutil.Process(supervisor.pid).children()
            assert len(workers) == 1
            [worker] = workers
            isolated = children(worker.pid)
            running = "SELECT count(*) FROM jsworker.jobs WHERE status = 'processing'"
            assert (len(isolated), await rows.value(running)) == (2, 2)
            return worker, isolated

        try:
            worker, isolated = await eventually(family, seconds=STARTED)
            worker.kill()

            async def gone() -> None:
                assert not any(each.is_running() for each in isolated)

            await eventually(gone)
        finally:
            # Not in order: its new worker process has taken the job that computes, and would wait for it.
            supervisor.send_signal(signal.SIGSTOP)
            for each in psutil.Process(supervisor.pid).children():
                each.kill()
            supervisor.kill()


# --- What cannot be. ---


def bad(**attributes: Any) -> type[JobProcessor[Any]]:
    async def process(_self: Any, _job: Job[Any]) -> None: ...

    body = {"kind": "bad", "isolation": "process", "process": process, "__module__": __name__, **attributes}
    return type("Bad", (JobProcessor,), body)


@pytest.mark.parametrize(
    ("attributes", "line"),
    [
        ({"isolation": "thread"}, "isolation='thread' of kind bad (Bad) must be None or 'process'"),
        ({"isolation": ["process"]}, "isolation=['process'] of kind bad (Bad) must be None or 'process'"),
        (
            {"max_memory_mb": -1},
            "max_memory_mb=-1 of kind bad (Bad) must be None or megabytes, more than 0 and at most 1000000",
        ),
        (
            {"max_jobs_per_process": 0},
            "max_jobs_per_process=0 of kind bad (Bad) must be None or a whole number from 1 to 1000000",
        ),
        (
            {"isolation": None, "max_memory_mb": 100},
            "max_memory_mb=100 of kind bad (Bad) needs isolation='process'",
        ),
        (
            {"isolation": None, "max_jobs_per_process": 9},
            "max_jobs_per_process=9 of kind bad (Bad) needs isolation='process'",
        ),
    ],
)
def test_bad_attributes_are_refused_in_one_line(
    settings: Settings, attributes: dict[str, Any], line: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        Worker([bad(**attributes)], settings)
    assert str(raised.value) == line


class Given(JobProcessor):
    """Made with something that no other process has."""

    isolation: ClassVar[Any] = "process"

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def process(self, job: Job[Any]) -> Any:
        return await self.gate.process(job)


@pytest.mark.parametrize("given", [Given(Gate()), bad()])
def test_a_processor_that_no_other_process_can_make_is_refused(settings: Settings, given: Processors) -> None:
    with pytest.raises(InvalidTarget, match=r"isolation='process' needs a class, or an instance, that can"):
        Worker([given], settings)
