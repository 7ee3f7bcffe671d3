"""A starting worker takes back what earlier lives held whose end this machine can prove, and no more."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jsworker import JobClient
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.workers import EarlierLife
from jsworker.worker.presence import Presence
from jsworker.worker.recovery import earlier_lives, resets
from jsworker.worker.recovery.earlier_lives import Reconciler, death_of, identify, start_of
from jsworker.worker.recovery.resets import DeadOwners
from tests.support.clock import Clock
from tests.support.contexts import make_context
from tests.support.files_at_their_limit import no_more_files
from tests.support.fleet import PATIENT, Fleet
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.lives import Lives, ended_pid
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

HOST = "app_worker-1"


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """Settings of a container in a pod; neither silence nor two witnesses give anything free."""
    return make_settings(
        hostname=HOST,
        pod_uid="pod-1",
        container="app",
        crash_threshold=None,
        stale_threshold=20.0,
        watchdog_timeout=15.0,
        ack_wait=60.0,
    )


@pytest.fixture
def lives(database: Database, rows: Rows, settings: Settings) -> Lives:
    return Lives(database, rows, settings)


async def no_stacks(_: bytes) -> bytes:
    return b""


async def add_everybody(lives: Lives) -> set[str]:
    """Register lives of every sort; return those that are proven to have ended."""
    gone = ended_pid()
    await lives.add("gone", pid=gone)
    await lives.add("pid-reused", process_started="1")
    await lives.add("own-container-before", pid_namespace="pid:[1]", pid=1)
    await lives.add("own-container-of-another-host-name", hostname="renamed", pid_namespace="pid:[1]", pid=1)
    ended = set(lives.jobs)
    await lives.add("twin")
    await lives.add("start-unknown", process_started=None)
    await lives.add("other-boot", pid=gone, boot_id="another", pod_uid=None, container=None)
    await lives.add("other-pid-namespace", pid=gone, pid_namespace="pid:[1]", pod_uid=None, container=None)
    await lives.add("other-container", pid=1, pid_namespace="pid:[1]", container="sidecar")
    await lives.add("no-container", pid=1, pid_namespace="pid:[1]", container=None)
    await lives.add("other-pod", pid=1, pid_namespace="pid:[1]", pod_uid="pod-2")
    # No pod at all: what is not known is not equal.
    for hostname in ("app_worker-10", "app_worker", "appXworker-1", "APP_WORKER-1", "%", HOST[:-1] + "_"):
        await lives.add(f"on {hostname}", hostname=hostname, pid=gone, pod_uid=None, container=None)
    return ended


async def test_what_is_proven_to_have_ended_is_taken_back_and_nothing_else(
    lives: Lives, start: StartWorker, rows: Rows
) -> None:
    ended = await add_everybody(lives)
    everybody = set(lives.jobs)
    running = await start(scripted(echo))
    [told] = await running.events.told("reconcile.completed")
    scans = count_rounds(running.worker._components.scans)
    await rounds_pass(scans, 2)

    assert await lives.kept() == everybody - ended
    assert told == {"jobs": len(ended), "workers": sorted(ended)}
    assert await lives.causes() == {"dead"}
    for worker_id in ended:
        [reset] = await rows.timeline(lives.jobs[worker_id])
        assert reset["worker_id"] == running.worker.id
        assert (reset["detail"]["owner"], reset["detail"]["counted"]) == (worker_id, True)
        row = await rows.job(lives.jobs[worker_id])
        assert (row["status"], row["stalls"], row["cleared"]) == ("queued", 1, True)
        assert row["clear_reason"].startswith(f"worker {worker_id} has ended: ")
    stopped = await rows.query("SELECT id FROM jsworker.workers WHERE state = 'stopped'")
    assert {row["id"] for row in stopped} == ended
    assert {event["cause"] for event in running.events.of("job.stalled")} == {"dead"}


async def test_of_one_that_was_killed_while_it_drained_no_stall_is_counted(
    lives: Lives, start: StartWorker, rows: Rows
) -> None:
    drained, killed = [await lives.add(name, pid=ended_pid()) for name in ("drained", "killed")]
    await rows.query("UPDATE jsworker.workers SET state = 'draining' WHERE id = %s", drained.id)
    running = await start(scripted(echo))
    await running.events.told("reconcile.completed")
    taken = [await rows.job(lives.jobs[each.id]) for each in (drained, killed)]
    assert [(row["status"], row["stalls"], row["attempts"]) for row in taken] == [
        ("queued", 0, 0),
        ("queued", 1, 1),
    ]


async def test_a_worker_without_a_pod_takes_no_unknown_pod_for_its_own(
    lives: Lives, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    await lives.add("nowhere", pid=1, pid_namespace="pid:[1]", pod_uid=None, container=None)
    running = await start(scripted(echo), with_settings=make_settings(hostname=HOST))
    assert await running.events.told("reconcile.completed") == [{"jobs": 0, "workers": []}]
    assert await lives.kept() == {"nowhere"}


async def test_another_container_of_the_same_name_that_is_alive_keeps_its_jobs_and_is_named(
    client: JobClient, lives: Lives, start: StartWorker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long a busy machine takes for the answer.
    monkeypatch.setattr(Presence, "answered_by", lambda presence, who: presence._witness.ask(who, 60.0))
    gate = Gate()
    twin = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()

    async def answers() -> None:
        assert twin.worker._components.presence.answers

    await eventually(answers)
    other = "UPDATE jsworker.workers SET pid_namespace = 'pid:[1]' WHERE id = %s"
    await rows.query(other, twin.worker.id)
    await lives.add("replaced", pid_namespace="pid:[1]", pid=1)
    running = await start(scripted(echo, kind="others"))
    [told] = await running.events.told("reconcile.completed")
    assert told["workers"] == ["replaced"]
    row = await rows.job(job.id)
    assert (row["status"], row["worker_id"], row["fencing_token"]) == ("processing", twin.worker.id, 1)
    [named] = running.events.of("worker.degraded")
    assert (
        named["reason"] == f"JSWORKER_CONTAINER=app is also that of worker {twin.worker.id}, which is alive"
    )
    gate.open()
    await twin.events.told("job.completed")


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


async def _of_another(lives: Lives, database: Database, pid: int) -> EarlierLife:
    """Return a life whose process has noted another start than a process of this id has."""
    await lives.add("another", pid=pid, process_started="1")
    [earlier] = await workers.earlier_lives(database, worker=lives.me)
    return earlier


@pytest.mark.parametrize("error", [PermissionError, None], ids=["of another user", "of this user"])
async def test_a_process_that_may_be_hidden_is_not_taken_for_gone(
    lives: Lives, database: Database, monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    def answer(_pid: int, _signal: int) -> None:
        if error is not None:
            raise error  # the kernel's word about another user's process, which /proc may not show

    earlier = await _of_another(lives, database, ended_pid())
    assert death_of(earlier, lives.me) == f"process {earlier.pid} of this host is gone"
    monkeypatch.setattr("os.kill", answer)
    assert death_of(earlier, lives.me) is None
    reused = replace(earlier, pid=lives.me.pid, process_started="1")
    assert death_of(reused, lives.me) is not None


async def test_a_process_that_has_ended_and_was_not_waited_for_is_gone(
    lives: Lives, database: Database, sleeping: subprocess.Popen[bytes]
) -> None:
    earlier = replace(
        await _of_another(lives, database, sleeping.pid), process_started=start_of(sleeping.pid)
    )
    assert death_of(earlier, lives.me) is None
    sleeping.send_signal(signal.SIGKILL)

    async def it_is_gone() -> None:
        assert death_of(earlier, lives.me) is not None

    await eventually(it_is_gone)
    assert sleeping.returncode is None


async def test_what_cannot_be_read_is_no_evidence(
    lives: Lives, database: Database, settings: Settings, sleeping: subprocess.Popen[bytes]
) -> None:
    """As where a process has too many files open: its twin is alive."""
    reused = await _of_another(lives, database, sleeping.pid)
    assert death_of(reused, lives.me) is not None
    with no_more_files():
        assert death_of(reused, lives.me) is None
        me = identify(settings, [])
    assert (me.boot_id, me.process_started) == (None, None)
    anew = replace(reused, pid_namespace="pid:[1]")
    assert death_of(anew, lives.me) == "container app of this pod was started anew"
    for unknown in ("boot_id", "pid_namespace"):
        assert death_of(replace(anew, **{unknown: None}), lives.me) is None  # type: ignore[arg-type]


def test_the_processes_of_another_pid_namespace_are_no_evidence(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after ``unshare --pid --fork``, without a new ``/proc``."""
    assert identify(settings, []).pid_namespace == str(Path("/proc/self/ns/pid").readlink())
    (tmp_path / str(os.getpid() + 1) / "ns").mkdir(parents=True)
    (tmp_path / str(os.getpid() + 1) / "ns/pid").symlink_to("pid:[1]")
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    monkeypatch.setattr("jsworker.worker.recovery.earlier_lives._PROC", tmp_path)
    assert identify(settings, []).pid_namespace is None


SHIFTED = ("unshare", "--user", "--map-root-user", "--time", "--boottime", "1000")


@pytest.fixture
def shifted() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose clocks are shifted."""
    command = [*SHIFTED, "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*SHIFTED, "true"], check=False, capture_output=True).returncode != 0,
    reason="a time namespace of its own is not allowed here",
)
async def test_another_start_by_a_shifted_clock_is_no_evidence(
    lives: Lives, database: Database, shifted: subprocess.Popen[bytes]
) -> None:
    """A process has noted its start by its own clock; ``/proc`` shows it by that of who reads it."""
    earlier = await _of_another(lives, database, shifted.pid)
    assert death_of(earlier, lives.me) is None
    shifted.kill()
    shifted.wait()
    assert death_of(earlier, lives.me) is not None


async def test_recovery_at_the_start_can_be_turned_off(
    lives: Lives, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    await lives.add("gone", pid=ended_pid())
    running = await start(scripted(echo), with_settings=make_settings(hostname=HOST, recover_on_start=False))
    await rounds_pass(count_rounds(running.worker._components.scans), 2)
    assert await lives.kept() == {"gone"}
    assert running.events.of("reconcile.completed") == []


async def test_a_claim_that_commits_after_its_owner_s_death_is_taken_back_too(
    lives: Lives, database: Database, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (earlier_lives, resets):
        monkeypatch.setattr(module, "boottime", clock)
    await lives.add("gone", pid=ended_pid())
    events, heard, done, requeued = Events(), Recorder(), list[float](), list[None]()
    events.on("*", heard)
    context = make_context(
        database, events=events, me=lives.me, settings=settings.model_copy(update={"statement_timeout": 2.0})
    )
    context.requeued.append(lambda: requeued.append(None))
    reconciler = Reconciler(
        context,
        DeadOwners(context),
        presence=Presence(context, no_stacks),
        siblings=[],
        done=lambda: done.append(clock()),
    )
    began = clock()
    step = asyncio.create_task(reconciler.step())

    async def is_taken_back(times: int) -> None:
        assert await lives.kept() == set()
        assert len(requeued) == times

    await eventually(lambda: is_taken_back(1))
    clock.now = began + 1.9
    late_claims = [await lives.hold("gone")]  # what was on its way when its process died
    await eventually(lambda: is_taken_back(2))
    assert done == []
    late_claims.append(await lives.hold("gone"))
    clock.now = began + 2.0
    await step
    assert done == [began + 2.0]
    assert {(await rows.job(claim))["status"] for claim in late_claims} == {"queued"}
    assert heard.of("reconcile.completed") == [{"jobs": 3, "workers": ["gone"]}]
    assert len(requeued) == 3
    state = "SELECT state FROM jsworker.workers WHERE id = 'gone'"
    assert await rows.value(state) == "stopped"


async def test_what_a_sibling_held_is_left_to_the_parent_until_the_last_round(
    lives: Lives, database: Database, settings: Settings
) -> None:
    await lives.add("gone", pid=ended_pid())
    await lives.add("sibling", pid=ended_pid())
    done: list[None] = []
    taken_back: list[tuple[list[str], float, int]] = []
    events = Events()
    events.on(
        "stale.recovered",
        lambda event: taken_back.append((event.fields["owners"], time.monotonic(), len(done))),
    )
    context = make_context(
        database, events=events, me=lives.me, settings=settings.model_copy(update={"statement_timeout": 2.0})
    )
    reconciler = Reconciler(
        context,
        DeadOwners(context),
        presence=Presence(context, no_stacks),
        siblings=["sibling"],
        done=lambda: done.append(None),
    )
    began = time.monotonic()
    await reconciler.step()
    assert await lives.kept() == set()
    assert done
    [(first, _, _), (last, at, done_before)] = taken_back
    assert (first, last, done_before) == (["gone"], ["sibling"], 0)
    assert at - began >= 2.0


async def test_the_jobs_of_a_killed_worker_run_again_at_once_when_its_host_starts_another(
    client: JobClient, fleet: Fleet, start: StartWorker, rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    [victim] = await fleet.started(1, **PATIENT)
    jobs = await client.enqueue_many("held", [{}] * 3)
    await victim.tells("start", times=3)
    victim.kill()
    own = make_settings(hostname="host-0", pod_uid="pod-1", container="app")
    running = await start(scripted(echo, kind="held"), with_settings=own)
    await running.events.told("job.completed", times=3)
    [dead] = victim.lines("worker.started")
    for job in jobs:
        row = await rows.job(job.id)
        assert (row["fencing_token"], row["stalls"]) == (2, 1)
        assert await rows.told(job.id) == ["reset", "claimed"]
        reset, _ = await rows.timeline(job.id)
        assert (reset["detail"]["cause"], reset["detail"]["owner"]) == ("dead", dead["worker_id"])
    seconds = await rows.value(
        "SELECT max(extract(epoch FROM j.claimed_at - w.started_at))::float8 FROM jsworker.jobs AS j"
        " JOIN jsworker.workers AS w ON w.id = %s",
        running.worker.id,
    )
    print(f"killed, started again on the same host: jobs claimed {seconds:.2f} s after the start")  # noqa: T201 -- a measurement for -rP
    [told] = await running.events.told("reconcile.completed")
    assert told == {"jobs": 3, "workers": [dead["worker_id"]]}
