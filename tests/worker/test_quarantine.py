"""Quarantine: a job whose next stall would be its last runs alone, and harms nobody but itself."""

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from jsworker import JobClient
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, variable_of
from jsworker.ownership.transitions import heartbeat
from jsworker.worker.pipeline.kinds import resolve_kinds
from jsworker.worker.worker import Worker
from tests.ownership.rows import Sql
from tests.support.polling import eventually
from tests.worker.isolated_processes import children, nothing_is_left
from tests.worker.perilous import SHAPED, Perilous, Shaped, Stubborn, Talkative, Waiting
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker
from tests.worker.slow_start import SlowStart
from tests.worker.tied import tied


@pytest.fixture
async def running(settings: Settings, request: pytest.FixtureRequest) -> Any:
    """A worker that was given the class, and so can make its processor in another process.

    Its parameter is the time-out of the watchdog: long, but for tests of hangs.
    """
    watchdog_timeout = getattr(request, "param", 20.0)
    own = settings.model_copy(update={"shutdown_timeout": 60.0, "watchdog_timeout": watchdog_timeout})
    started = Running(Worker([Perilous, Stubborn, Waiting, scripted(echo)], own))
    started.worker.on("*", started.events)
    await started.worker.start()
    yield started
    await started.end()


async def error_of_hook(job_id: UUID) -> BaseException:
    """Wait for the call of ``on_failed`` in this process, and return the error that it got."""

    async def found() -> BaseException:
        assert job_id in Perilous.failed
        return Perilous.failed[job_id]

    return await eventually(found)


async def test_the_job_runs_in_another_process_under_the_same_token(
    running: Running, client: JobClient, rows: Rows
) -> None:
    for size in (0, 50_000):
        job = await client.enqueue("perilous", {"does": "return", "text": "x" * size})
        row = await rows.becomes(job.id, "completed")
        assert row["result"]["pid"] != os.getpid()
        assert (row["result"]["token"], row["fencing_token"], row["result"]["attempt"]) == (1, 1, 1)
        await nothing_is_left()
    assert [event["quarantined"] for event in running.events.of("job.started")] == [True, True]


async def test_the_job_may_not_wait_for_one_that_needs_a_slot_of_its_owner(
    running: Running, client: JobClient, rows: Rows, settings: Settings
) -> None:
    names = ("database_url", "nats_url", "stream", "subject_prefix")
    servers = {name: str(getattr(settings, name)) for name in names} | {
        "database_url": settings.database_dsn()
    }
    job = await client.enqueue(Waiting, servers)
    row = await rows.becomes(job.id, "completed")
    assert "which serves kind scripted itself" in row["result"]
    [started] = running.events.of("job.started")
    assert started["quarantined"] is True


async def test_a_job_that_has_stalls_left_runs_beside_the_others(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "return"}, max_stalls=2)
    row = await rows.becomes(job.id, "completed")
    assert row["result"]["pid"] == os.getpid()
    again = await client.enqueue("perilous", {"does": "return"}, max_stalls=3, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET stalls = 2, attempts = 2, run_at = now() WHERE id = %s", again.id
    )
    row = await rows.becomes(again.id, "completed")
    assert row["result"]["pid"] != os.getpid()


async def test_after_two_stalls_a_job_runs_alone_however_many_it_is_allowed(
    running: Running, client: JobClient, rows: Rows
) -> None:
    for stalls, alone in ((1, False), (2, True)):
        job = await client.enqueue("perilous", {"does": "return"}, max_stalls=100, delay=3600)
        await rows.query(
            "UPDATE jsworker.jobs SET stalls = %s, attempts = %s, run_at = now() WHERE id = %s",
            *(stalls, stalls, job.id),
        )
        row = await rows.becomes(job.id, "completed")
        assert (row["result"]["pid"] != os.getpid()) is alone


async def test_the_row_tells_that_a_job_has_begun_that_should_run_alone_and_cannot(
    start: StartWorker, client: JobClient, rows: Rows
) -> None:
    gate = Gate()
    await start(scripted(gate.process))
    for stalls, noted in ((1, False), (2, True)):
        job = await client.enqueue("scripted", {}, max_stalls=3, delay=3600)
        await rows.query(
            "UPDATE jsworker.jobs SET stalls = %s, attempts = %s, run_at = now() WHERE id = %s",
            *(stalls, stalls, job.id),
        )
        await gate.met()
        row = await rows.job(job.id)
        assert (row["progress_at"] is not None) is noted
    gate.open()


async def test_a_job_that_is_lost_before_its_beginning_is_noted_does_not_begin(
    start: StartWorker, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = heartbeat.update_progress

    async def late_note(*arguments: Any, **values: Any) -> None:
        if values["held"][1] == 1:
            await client.clear_and_reenqueue(values["held"][0], reason="by hand")
        await note(*arguments, **values)

    monkeypatch.setattr(heartbeat, "update_progress", late_note)
    gate = Gate()
    gate.open()
    await start(scripted(gate.process))
    job = await client.enqueue("scripted", {}, max_stalls=1)
    row = await rows.becomes(job.id, "completed")
    assert (row["fencing_token"], row["stalls"], row["errors"]) == (2, 0, 0)
    assert (await gate.met()).fencing_token == 2
    assert gate.waiting == 0


async def test_a_job_that_takes_its_process_down_fails_alone(
    running: Running, client: JobClient, rows: Rows
) -> None:
    ways = {"be killed": "was killed by SIGKILL", "exit": "ended with exit code 3"}
    for number, (does, how) in enumerate(ways.items(), 1):
        job = await client.enqueue("perilous", {"does": does})
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["stalls"], row["errors"], row["attempts"]) == ("stalled", 1, 0, 1)
        assert how in row["last_error"]
        assert "alone" in row["last_error"]
        neighbour = await client.enqueue("scripted", {"n": 1})
        await rows.becomes(neighbour.id, "completed")
        stalled = await running.events.told("job.stalled", times=number)
        assert len(stalled) == number
        assert stalled[-1]["job_id"] == str(job.id)
        [failed] = [event for event in await rows.timeline(job.id) if event["event"] == "failed"]
        assert how in failed["error"]
        error = await error_of_hook(job.id)
        assert (type(error), str(error)) == (RuntimeError, row["last_error"])


async def test_a_crash_that_is_not_the_last_stall_is_told_and_followed_by_a_pause(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "be killed"}, max_stalls=100, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET stalls = 6, attempts = 6, run_at = now() WHERE id = %s", job.id
    )
    [stalled] = await running.events.told("job.stalled")
    assert (stalled["job_id"], stalled["counted"]) == (str(job.id), True)
    row = await rows.job(job.id)
    assert (row["status"], row["stalls"], row["errors"]) == ("scheduled", 7, 0)
    pause = "SELECT extract(epoch FROM run_at - clock_timestamp())::float8 FROM jsworker.jobs WHERE id = %s"
    assert 60 < await rows.value(pause, job.id) < 192


async def test_a_path_among_those_of_the_modules_that_is_no_text_is_ignored_as_python_does(
    running: Running, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    job = await client.enqueue("perilous", {"does": "return"}, max_attempts=1)
    row = await rows.becomes(job.id, "completed")
    assert row["attempts"] == 1


@pytest.mark.parametrize(
    ("does", "how"),
    [("blocks", "was killed by SIGKILL before the job began: it had not started"), ("exits", "exit code 3")],
)
async def test_a_process_that_does_not_start_is_an_error_and_no_stall(
    start: StartWorker,
    client: JobClient,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    does: str,
    how: str,
) -> None:
    monkeypatch.setenv("IMPORT", does)
    seconds = 2.0 if does == "blocks" else 600.0
    running = await start(SlowStart, with_settings=settings.model_copy(update={"startup_timeout": seconds}))
    job = await client.enqueue("slow-start", {})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["errors"], row["stalls"], row["attempts"]) == (1, 0, 1)
    assert row["last_error"].startswith("the process in which the job was to run alone")
    assert how in row["last_error"]
    await nothing_is_left()
    if does == "blocks":
        monkeypatch.setenv("IMPORT", "works")
        await running.worker.close()
        await start(SlowStart)
        again = await client.enqueue("slow-start", {})
        await rows.becomes(again.id, "completed")


async def test_a_process_that_the_system_cannot_start_is_no_error_of_the_job(
    running: Running, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no process")

    with monkeypatch.context() as broken:
        broken.setattr("jsworker.worker.isolation.isolated_process.subprocess.Popen", no_process)
        job = await client.enqueue("perilous", {"does": "return"}, max_attempts=1)
        [degraded] = await running.events.told("worker.degraded")
        assert degraded["what"] == "quarantine"
        assert degraded["reason"].endswith("could not be started: BlockingIOError: [Errno 11] no process")
        await running.events.told("job.released")
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["stalls"], row["attempts"]) == (0, 0, 1)
    await running.events.told("worker.restored")


async def test_processes_start_one_after_the_other_and_none_in_vain(
    client: JobClient,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("IMPORT", str(tmp_path / "gate"))
    async with tied(SlowStart, settings=settings) as (running, supervision):
        jobs = await client.enqueue_many("slow-start", [{}] * 3)

        async def one_starts() -> psutil.Process:
            assert len(running.events.of("job.claimed")) == len(jobs)
            assert len(supervision.begun) == 1
            started = children()
            assert len(started) == 1
            return started[0]

        process = await eventually(one_starts)
        [first] = supervision.begun
        await client.cancel(first)
        await rows.becomes(first, "cancelled")

        async def it_has_ended() -> None:  # some time after its row tells so
            assert first not in supervision.begun

        await eventually(it_has_ended)
        assert supervision.begun == []  # the others wait: nothing of them could kill this worker
        assert children() == [process]
        (tmp_path / "gate").touch()
        ended = [await rows.becomes(job.id, "completed") for job in jobs if job.id != first]

        async def all_have_ended() -> None:
            assert supervision.begun == []

        await eventually(all_have_ended)
    pids = [row["result"] for row in ended]
    assert process.pid in pids
    assert len(set(pids)) == len(pids)
    await nothing_is_left()


async def test_jobs_that_wait_for_their_processes_leave_the_slots_to_others(
    start: StartWorker,
    client: JobClient,
    rows: Rows,
    settings: Settings,
    *,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("IMPORT", str(tmp_path / "gate"))
    own = settings.model_copy(update={"concurrency": 3})
    running = await start(SlowStart, scripted(echo), with_settings=own)

    async def one_starts(*, claimed: int) -> None:
        assert len(running.events.of("job.claimed")) >= claimed
        assert len(children()) == 1

    slow = await client.enqueue_many("slow-start", [{}] * 2)
    await eventually(partial(one_starts, claimed=2))
    shared = await client.enqueue("slow-start", {}, max_stalls=2)
    await rows.becomes(shared.id, "completed")
    slow += await client.enqueue_many("slow-start", [{}] * 2)
    await eventually(partial(one_starts, claimed=4))
    for n in range(2):
        job = await client.enqueue("scripted", {"n": n})
        await rows.becomes(job.id, "completed")
    await running.worker.close(force=True)
    assert [(await rows.job(job.id))["status"] for job in slow] == ["queued"] * 4
    (tmp_path / "gate").touch()
    await start(SlowStart, with_settings=own)
    for job in slow:
        row = await rows.becomes(job.id, "completed")
        assert (row["errors"], row["stalls"], row["attempts"]) == (0, 0, 1)


async def test_what_is_cancelled_or_lost_in_line_does_not_wait_for_its_turn(
    start: StartWorker,
    client: JobClient,
    rows: Rows,
    settings: Settings,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPORT", "blocks")
    own = settings.model_copy(update={"startup_timeout": 600.0})
    running = await start(SlowStart, with_settings=own)
    await client.enqueue_many("slow-start", [{}] * 3)

    async def two_are_in_line() -> list[UUID]:
        assert len(running.events.of("job.started")) == 1
        assert len(running.events.of("job.claimed")) == 3
        begun = running.events.of("job.started")[0]["job_id"]
        claimed = [str(event["job_id"]) for event in running.events.of("job.claimed")]
        return [UUID(job_id) for job_id in claimed if job_id != begun]

    cancelled, lost = await eventually(two_are_in_line)
    await client.cancel(cancelled)
    await rows.take_back(lost)
    await rows.becomes(cancelled, "cancelled")
    [told] = await running.events.told("job.lost")
    assert told["job_id"] == str(lost)
    assert len(running.events.of("job.started")) == 1


async def test_a_locked_row_holds_up_no_other_job_in_line(
    client: JobClient,
    rows: Rows,
    settings: Settings,
    sql: Sql,
    *,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("IMPORT", str(tmp_path / "gate"))
    async with tied(SlowStart, settings=settings) as (running, _):
        await client.enqueue_many("slow-start", [{}] * 3)

        async def all_are_in_line() -> list[UUID]:
            line = [UUID(str(event["job_id"])) for event in running.events.of("job.claimed")]
            assert len(line) == 3
            assert len(children()) == 1
            return line

        first, second, third = await eventually(all_are_in_line)
        with sql.transaction():
            sql.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [second])
            (tmp_path / "gate").touch()
            await rows.becomes(first, "completed")
            await rows.becomes(third, "completed")
        await rows.becomes(second, "completed")
    assert (await rows.job(second))["stalls"] == 0


@pytest.mark.parametrize(("ends", "runs"), [("its run", 1), ("all runs", 3), ("its worker", 3)])
async def test_a_process_that_nobody_waits_for_is_not_started_to_its_end(
    client: JobClient,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    ends: str,
    runs: int,
) -> None:
    monkeypatch.setenv("IMPORT", str(tmp_path / "never"))
    async with tied(SlowStart, settings=settings) as (running, supervision):
        jobs = [job.id for job in await client.enqueue_many("slow-start", [{}] * runs)]

        async def starts() -> None:
            assert len(running.events.of("job.claimed")) == runs
            assert len(supervision.begun) == 1
            assert len(children()) == 1

        await eventually(starts)
        if ends == "its worker":
            assert await running.worker.close(force=True) == 0
            assert [(await rows.job(job))["status"] for job in jobs] == ["queued"] * runs
        else:
            await rows.query("UPDATE jsworker.jobs SET cancel_requested = true")
            for job in jobs:
                await rows.becomes(job, "cancelled")
        await nothing_is_left()


async def test_what_else_fails_while_its_process_is_prepared_is_an_error_of_the_attempt(
    running: Running, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(*_: object) -> None:
        raise LookupError("something of the worker is broken")

    monkeypatch.setattr("jsworker.worker.isolation.isolated_process.IsolatedProcess.prepare", prepare)
    job = await client.enqueue("perilous", {"does": "return"}, max_attempts=1)
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["stalls"]) == ("attempts", 0)
    assert row["last_error"].startswith("LookupError: something of the worker is broken")
    await nothing_is_left()


async def test_an_exception_is_an_error_as_anywhere(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "raise"}, max_attempts=1)
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"], row["stalls"]) == ("attempts", 1, 0)
    assert row["last_error"].startswith("ValueError: raised in quarantine")
    error = await error_of_hook(job.id)
    assert (type(error), str(error)) == (RuntimeError, "ValueError: raised in quarantine")
    [failed] = [event for event in running.events.events if event.name == "job.failed"]
    assert failed.exception is None


async def test_progress_and_checkpoint_are_written_under_the_owner_s_token(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "report"})
    row = await rows.becomes(job.id, "completed")
    assert (row["stage"], row["progress"], row["checkpoint"]) == ("alone", 0.5, {"seen": None})


async def test_what_it_has_printed_and_logged_is_written_before_its_process_is_ended(
    start: StartWorker,
    client: JobClient,
    rows: Rows,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it buffers what it prints
    await start(Talkative)
    job = await client.enqueue("talkative", {"lines": 5000})
    await rows.becomes(job.id, "completed", seconds=60.0)
    await nothing_is_left()
    captured = capfd.readouterr()
    assert captured.out.count("printed in quarantine") == 1
    assert captured.err.count("logged in quarantine") == 5000


async def test_programs_that_the_job_starts_heed_signals(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "end a program"})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"code": -signal.SIGTERM}


async def test_its_own_transaction_completes_the_job_once(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "complete"})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"by": "its transaction"}
    assert await rows.value("SELECT count(*) FROM effects") == 0
    await running.events.told("job.completed")


async def test_a_completed_job_stays_completed_when_its_process_dies_right_after(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "complete and be killed"})
    await running.events.told("job.completed")
    row = await rows.job(job.id)
    assert (row["status"], row["stalls"], row["result"]) == ("completed", 0, {"by": "its transaction"})


@pytest.mark.parametrize("running", [1.5], indirect=True)
async def test_a_process_whose_event_loop_hangs_is_killed_in_time(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("perilous", {"does": "block"})
    row = await rows.becomes(job.id, "failed")
    assert row["failure_reason"] == "stalled"
    assert "has not ticked for 1.5 s" in row["last_error"]
    await nothing_is_left()


@pytest.mark.parametrize("running", [1.5], indirect=True)
async def test_an_announced_quiet_phase_is_respected(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "be quiet and block"})
    row = await rows.becomes(job.id, "completed")
    assert row["fencing_token"] == 1


async def test_a_plain_function_that_ignores_its_time_out_is_ended_with_its_process(
    running: Running, client: JobClient, rows: Rows
) -> None:
    job = await client.enqueue("stubborn", {})
    row = await rows.becomes(job.id, "failed")
    assert row["failure_reason"] == "stalled"
    assert "although it was told to stop: timeout" in row["last_error"]
    await nothing_is_left()


async def test_cancel_ends_it(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "wait"})
    await rows.becomes(job.id, "processing")
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    await nothing_is_left()


async def test_a_lost_job_is_stopped_there_too(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "wait"})
    await running.events.told("job.started")
    await rows.take_back(job.id)
    await running.events.told("job.lost")
    await nothing_is_left()
    assert (await rows.job(job.id))["status"] == "scheduled"


async def test_it_is_told_that_its_worker_drains(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "wait to be told"})
    await running.events.told("job.started")
    assert await running.worker.close() == 0
    assert (await rows.job(job.id))["status"] == "completed"


async def test_shutdown_hands_it_back(running: Running, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("perilous", {"does": "wait"})
    await running.events.told("job.started")
    assert await running.worker.close(force=True) == 0
    row = await rows.job(job.id)
    assert (row["status"], row["attempts"], row["stalls"]) == ("queued", 0, 0)
    await nothing_is_left()


async def test_the_process_dies_with_its_owner(client: JobClient, rows: Rows, settings: Settings) -> None:
    environment = {variable_of(name): str(getattr(settings, name)) for name in settings.model_fields_set}
    command = [sys.executable, "-m", "jsworker", "run", "tests.worker.perilous:Perilous"]
    job = await client.enqueue("perilous", {"does": "wait"}, max_stalls=20)
    await rows.query("UPDATE jsworker.jobs SET stalls = 19, attempts = 19 WHERE id = %s", job.id)
    with subprocess.Popen(command, env={**os.environ, **environment}) as supervisor:  # noqa: ASYNC220 -- starts at once

        async def family() -> tuple[psutil.Process, psutil.Process]:
            for worker in psutil.Process(supervisor.pid).children():
                for quarantined in children(worker.pid):
                    return worker, quarantined
            raise AssertionError("nothing in quarantine yet")

        try:
            worker, quarantined = await eventually(family)
            worker.kill()

            async def gone() -> None:
                assert not quarantined.is_running()

            await eventually(gone)
        finally:
            supervisor.terminate()


async def test_an_instance_that_nobody_else_can_make_runs_in_its_worker_and_says_so(
    start: StartWorker, client: JobClient, rows: Rows
) -> None:
    running = await start(Shaped("square"))
    job = await client.enqueue("shaped", {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"pid": os.getpid(), "shape": "square", "attempt": 1}
    [told] = running.events.of("worker.degraded")
    assert told["what"] == "quarantine of kind shaped"


async def test_a_class_with_arguments_that_may_be_left_out_is_made_again(
    start: StartWorker, client: JobClient, rows: Rows
) -> None:
    await start(Shaped)
    job = await client.enqueue("shaped", {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"]["pid"] != os.getpid()
    assert row["result"]["shape"] == "plain"


async def test_an_instance_at_module_level_is_found_again(
    start: StartWorker, client: JobClient, rows: Rows
) -> None:
    await start(SHAPED)
    job = await client.enqueue("shaped", {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"]["pid"] != os.getpid()
    assert row["result"]["shape"] == "round"


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        (Perilous, "tests.worker.perilous:Perilous"),
        (Perilous(), "tests.worker.perilous:Perilous"),
        (SHAPED, "tests.worker.perilous:SHAPED"),
        (Shaped("square"), None),
        (scripted(Gate().process), None),
    ],
)
def test_origins(
    given: JobProcessor[Any] | type[JobProcessor[Any]], origin: str | None, settings: Settings
) -> None:
    [kind] = resolve_kinds([given], settings).values()
    assert kind.origin == origin
