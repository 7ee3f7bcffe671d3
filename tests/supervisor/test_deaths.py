"""A child that dies or hangs: its jobs run again at once, and its place is filled again."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from tests.ownership.rows import Sql, counters, read_events, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.proxy import proxied

pytestmark = pytest.mark.hurried

WATCHDOG_SECONDS = 1.5
SLOW_RULES: dict[str, Any] = {
    "heartbeat_interval": 2.5,
    "statement_timeout": 2.0,
    "stale_threshold": 300.0,
    "crash_threshold": 200.0,
    "ack_wait": 600.0,
}
"""Thresholds of silence that no test reaches: what is taken back is taken back for another reason."""
ASLEEP = "SELECT worker_id FROM jsworker.jobs WHERE stage = 'asleep' AND status = 'processing'"


async def ends_completed(sql: Sql, job_id: Any, seconds: float = 60.0) -> dict[str, Any]:
    async def completed() -> dict[str, Any]:
        job = read_job(sql, job_id)
        assert job["status"] == "completed", job
        return job

    return await eventually(completed, seconds=seconds)


async def owner_of_sleeper(sql: Sql) -> str:
    """Wait until a Nap job sleeps and return its owner."""

    async def asleep() -> str:
        rows = sql.execute(ASLEEP).fetchall()
        assert rows
        return str(rows[0]["worker_id"])

    return await eventually(asleep)


async def pid_of(parent: ParentProcess, worker_id: str) -> int:
    """Wait until the parent has told of a child's start, which may be after its first claim."""

    async def told() -> int:
        pids = [line["pid"] for line in parent.lines("child.started") if line["worker_id"] == worker_id]
        assert len(pids) == 1, f"{worker_id}: {parent.log}"
        return int(pids[0])

    return await eventually(told)


async def test_the_job_of_a_child_that_is_killed_or_taken_down_runs_again_at_once_and_the_child_too(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    # Slow rules: only what the parent has seen of its child takes a job back.
    parent = supervise("Nap", "Aborts", "Blocks", "HoldsGil", processes=2, **SLOW_RULES)
    await parent.ready(2)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)

    parent.send(signal.SIGKILL, await pid_of(parent, owner))

    job = await ends_completed(sql, job_id)
    assert counters(job) == (2, 0, 1)
    [sibling] = [
        line["worker_id"] for line in parent.lines("child.started")[:2] if line["worker_id"] != owner
    ]
    [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
    assert reset["worker_id"] == sibling
    detail = reset["detail"]
    assert (detail["cause"], detail["owner"], detail["counted"]) == ("dead", owner, True)
    assert detail["reason"] == "its process ended: signal SIGKILL"
    assert (await parent.tells("child.died"))[0]["how"] == "signal SIGKILL"
    again = (await parent.tells("child.started", 3))[-1]
    assert again["generation"] == 2
    assert not parent.lines("child.restart_delayed")

    for number, kind in enumerate(("aborts", "blocks", "holds-gil")):
        job_id = (await client.enqueue(kind, {})).id
        assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)
        [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
        assert reset["detail"]["cause"] == "dead"
        died = (await parent.tells("child.died", number + 2))[-1]
        if kind == "aborts":
            assert died["how"] == "signal SIGABRT"
            continue
        assert died["how"] in {"signal SIGKILL", "exit code 0"}
        assert len(await parent.tells("child.hung", number)) == number
    await parent.says("my_jobs.py")  # the stacks


async def owner_is_killed(parent: ParentProcess, client: JobClient, sql: Sql) -> tuple[UUID, str]:
    """Kill the only child in a job; return the job, completed by another run, and its former owner."""
    await parent.ready(1)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL, await pid_of(parent, owner))
    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)
    return job_id, owner


async def test_an_only_childs_job_is_taken_back_by_the_parent_itself(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", recover_on_start=False, **SLOW_RULES)
    job_id, owner = await owner_is_killed(parent, client, sql)
    # The row may have been locked by the dead one's last statement when it was looked for first.
    buried = (await parent.tells("dead_owner.reset"))[-1]
    assert (buried["worker_id"], buried["jobs"]) == (owner, {"queued": 1})
    assert buried["seconds"] < SLOW_RULES["crash_threshold"]
    [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
    assert reset["worker_id"].startswith("supervisor-")

    async def dead_is_stopped() -> None:
        row = sql.execute("SELECT state FROM jsworker.workers WHERE id = %s", [owner]).fetchone()
        assert row == {"state": "stopped"}

    await eventually(dead_is_stopped)


OTHER_HOST = """
import socket, sys

if "jsworker.supervisor.child_main" in sys.orig_argv:
    socket.gethostname = lambda: "renamed"
"""


async def test_a_host_that_is_renamed_while_its_supervisor_runs_loses_no_child_from_sight(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_HOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    parent = supervise("Nap", recover_on_start=False, **SLOW_RULES)
    _, owner = await owner_is_killed(parent, client, sql)
    assert (await parent.tells("dead_owner.reset"))[-1]["worker_id"] == owner
    assert owner.startswith(f"{socket.gethostname()}-")


SLOW_IMPORT = """
import os, sys, time

class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "jsworker.ownership.database" and "jsworker.supervisor.child_main" not in sys.orig_argv:
            while not os.path.exists({go_on!r}):
                time.sleep(0.01)

sys.meta_path.insert(0, Waits())
"""


async def test_the_parent_watches_its_children_while_it_loads_what_it_takes_jobs_back_with(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go on"
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT.format(go_on=str(go_on)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = supervise("Nap", recover_on_start=False, **SLOW_RULES)
    await parent.ready(1)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL, await pid_of(parent, owner))

    await parent.tells("child.started", 2)
    assert not parent.lines("dead_owner.reset")
    go_on.touch()
    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)


async def test_a_dead_worker_whose_row_cannot_be_changed_is_buried_all_the_same(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    sql.execute("""
        CREATE FUNCTION jsworker.keep() RETURNS trigger LANGUAGE plpgsql AS
          $$ BEGIN RAISE EXCEPTION 'kept' USING ERRCODE = 'insufficient_privilege'; END $$
    """)
    sql.execute("""
        CREATE TRIGGER kept BEFORE UPDATE ON jsworker.workers
          FOR EACH ROW WHEN (NEW.state = 'stopped') EXECUTE FUNCTION jsworker.keep()
    """)
    parent = supervise("Nap", **SLOW_RULES)
    await parent.ready(1)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL, await pid_of(parent, owner))

    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)
    [refused] = await parent.tells("dead_owner.row_refused")
    assert refused["worker_id"] == owner
    assert not parent.lines("dead_owner.waiting")


async def test_a_new_child_leaves_to_the_parent_what_its_sibling_held(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    """The sibling that was asked to take the job back does not; the parent looks one time-out later."""
    rules = SLOW_RULES | {"statement_timeout": 5.0, "heartbeat_interval": 6.0, "watchdog_timeout": 60.0}
    parent = supervise("Nap", processes=2, **rules)
    await parent.ready(2)
    # What it looks with, the parent loads for the first dead child; a busy machine may take long for that.
    first = (await client.enqueue("nap", {"seconds": 3600})).id
    dead = await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL, await pid_of(parent, dead))
    await ends_completed(sql, first)
    await parent.tells("dead_owner.reset")
    await parent.ready(3)

    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    [sibling] = [line for line in parent.lines("child.started") if line["worker_id"] not in {dead, owner}]
    parent.send(signal.SIGSTOP, sibling["pid"])
    parent.send(signal.SIGKILL, await pid_of(parent, owner))

    assert counters(await ends_completed(sql, job_id, seconds=60)) == (2, 0, 1)
    [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
    assert reset["worker_id"].startswith("supervisor-")
    assert reset["detail"]["reason"] == "its process ended: signal SIGKILL"


async def test_a_job_that_kills_every_process_shares_two_whatever_its_limit(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Poison", processes=2)
    await parent.ready(2)
    job_id = (await client.enqueue("poison", {}, max_stalls=100)).id

    async def stalled_often() -> None:
        sql.execute("UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE status = 'scheduled'")
        assert read_job(sql, job_id)["stalls"] >= 4

    await eventually(stalled_often)
    aborted = [line for line in await parent.tells("child.died", 2) if line["how"] == "signal SIGABRT"]
    assert len(aborted) == 2, "\n".join(str(event) for event in read_events(sql, job_id))


WAYS_TO_END_A_WORKER = {
    "stop": "Event loop stopped before Future completed",
    "interrupt": "in _interrupt",
    "cancel": "CancelledError",
    "terminate": "it got SIGTERM, but not from its parent",
    "memory": "in _fail",
}


async def test_a_job_that_ends_its_worker_in_any_way_is_counted_and_ends(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    # A parent that stood still, for longer the longer this time-out is, counts no stalls.
    parent = supervise("Ends", "Exits", shutdown_timeout=0.5, watchdog_timeout=15.0, **SLOW_RULES)
    await parent.ready()
    for number, (how, said) in enumerate(WAYS_TO_END_A_WORKER.items(), start=1):
        before = len(parent.log)
        job_id = (await client.enqueue("ends", {"how": how})).id
        assert counters(await ends_completed(sql, job_id)) == (2, 0, 1), how
        ended = (await parent.tells("child.died", number))[-1]
        assert ended["how"] == "exit code 1", how
        flushed = (tmp_path / "flushed").read_text().splitlines()
        assert {f"{ended['pid']} middleware", f"{ended['pid']} claim"} <= set(flushed), how
        assert len(parent.lines("worker.died")) == number, how
        assert said in parent.log[before:], how

    before = len(parent.log)
    exits = (await client.enqueue("exits", {}, max_stalls=2)).id

    async def failed() -> dict[str, Any]:
        job = read_job(sql, exits)
        assert (job["status"], job["failure_reason"]) == ("failed", "stalled"), job
        return job

    assert (await eventually(failed, seconds=60))["stalls"] == 2
    died = await parent.tells("child.died", len(WAYS_TO_END_A_WORKER) + 1)
    assert died[-1]["how"] == "exit code 1"
    assert "in _leave" in parent.log[before:]  # the traceback


async def test_what_a_job_does_to_its_process_counts_also_while_the_parent_stands_still(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Aborts", watchdog_timeout=WATCHDOG_SECONDS)
    await parent.ready()
    [child] = parent.lines("child.started")
    parent.send(signal.SIGSTOP)
    job_id = (await client.enqueue("aborts", {})).id

    stat = Path(f"/proc/{child['pid']}/stat")

    async def died() -> None:
        assert ") Z " in await asyncio.to_thread(stat.read_text)

    await eventually(died)
    await asyncio.sleep(2 * WATCHDOG_SECONDS)  # the time for which it is seen to have stood still
    parent.send(signal.SIGCONT)
    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)


async def test_only_once_a_job_is_taken_for_innocent_that_is_killed_while_the_parent_stands_still(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Thrashes", watchdog_timeout=WATCHDOG_SECONDS, **SLOW_RULES)
    await parent.ready()
    job_id = (await client.enqueue("thrashes", {})).id
    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)
    counted = [each["detail"]["counted"] for each in read_events(sql, job_id) if each["event"] == "reset"]
    assert counted[-1]
    assert len(counted) <= 2


async def test_a_job_that_keeps_the_event_loop_in_its_quiet_phase_costs_its_neighbours_nothing(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    """Their process heartbeats for none of them meanwhile, and another one looks for silent owners."""
    supervise("Nap", "LongQuiet")
    watcher = supervise("Aborts")
    await watcher.ready(1)
    neighbour = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    quiet = await ends_completed(sql, (await client.enqueue("long-quiet", {})).id)
    assert quiet["fencing_token"] == 1
    row = read_job(sql, neighbour)
    assert (row["status"], row["worker_id"], row["fencing_token"]) == ("processing", owner, 1)
    assert watcher.lines("job.stalled") == []


async def test_a_quiet_phase_is_not_taken_for_a_hang_and_hides_none_once_its_job_has_left_it(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Quiet", "LeavesQuiet", "Blocks")
    await parent.ready()
    quiet = await ends_completed(sql, (await client.enqueue("quiet", {})).id)
    assert counters(quiet) == (1, 0, 0)
    assert parent.lines("child.hung") == []
    await ends_completed(sql, (await client.enqueue("leaves-quiet", {})).id)
    blocking = (await client.enqueue("blocks", {})).id
    assert counters(await ends_completed(sql, blocking)) == (2, 0, 1)
    assert len(await parent.tells("child.hung")) == 1


async def test_a_run_that_ignores_its_time_out_ends_with_its_process_and_is_named(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    # Only the parent takes back what its child held.
    parent = supervise("Stubborn", "Swallows", "Nap", recover_on_start=False, **SLOW_RULES)
    for number, kind in enumerate(("stubborn", "swallows"), start=1):
        pid = (await parent.ready(number))[-1]
        innocent = (await client.enqueue("nap", {"seconds": 3600})).id
        await owner_of_sleeper(sql)
        culprit = (await client.enqueue(kind, {})).id
        assert counters(await ends_completed(sql, culprit)) == (2, 0, 1)
        assert counters(await ends_completed(sql, innocent)) == (1, 0, 0)
        condemned = (await parent.tells("child.stop_ignored", number))[-1]
        assert (condemned["pid"], condemned["culprits"]) == (pid, [str(culprit)])
        ignored = (await parent.tells("job.stop_ignored", number))[-1]
        assert (ignored["level"], ignored["job_id"], ignored["stop"]) == ("error", str(culprit), "timeout")
        for job_id, counted in ((culprit, True), (innocent, False)):
            [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
            assert reset["detail"]["counted"] is counted
            told = f"job {culprit} went on although it was told to stop: timeout"
            assert told in reset["detail"]["reason"]
        if kind == "stubborn":
            await parent.says("my_jobs.py")  # the stack
    assert len(parent.lines("child.stop_ignored")) == len(parent.lines("job.stop_ignored")) == number


async def test_the_dead_are_remembered_while_the_database_is_away(
    supervise: Supervise, client: JobClient, sql: Sql, settings: Settings
) -> None:
    async with proxied(settings.database_url) as (proxy, url):
        parent = supervise("Nap", processes=2, database_url=url)
        await parent.ready(2)
        job_id = (await client.enqueue("nap", {"seconds": 3600})).id
        owner = await owner_of_sleeper(sql)
        proxy.cut()
        parent.send(signal.SIGKILL, await pid_of(parent, owner))
        [waiting] = await parent.tells("dead_owner.waiting")
        assert (waiting["worker_id"], waiting["dead"]) == (owner, 1)
        assert read_job(sql, job_id)["worker_id"] == owner
        proxy.restore()
        [buried] = await parent.tells("dead_owner.reset")
        assert buried["worker_id"] == owner
        await ends_completed(sql, job_id)


async def test_what_a_dead_child_held_stays_where_recovery_is_off(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", recovery="off", scan_interval=0.2, **SLOW_RULES)
    await parent.ready(1)
    [told] = await parent.tells("recovery.off")
    assert (told["level"], told["rules"]) == ("warning", ["supervisor", "start", "crashed", "stale"])
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL, await pid_of(parent, owner))

    [left] = await parent.tells("dead_owner.not_reset")
    assert (left["level"], left["worker_id"]) == ("warning", owner)
    await parent.tells("child.started", 2)
    other = (await client.enqueue("nap", {"seconds": 0})).id
    await ends_completed(sql, other)
    assert read_job(sql, job_id)["worker_id"] == owner
    await client.clear_and_reenqueue(job_id, "its worker is gone")
    assert counters(await ends_completed(sql, job_id)) == (1, 0, 0)


async def test_a_child_that_cannot_start_ends_its_supervisor_only_if_no_other_works(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    parent = supervise("Nap", processes=2, **SLOW_RULES)
    pids = await parent.ready(2)
    module = tmp_path / "my_jobs.py"
    text = module.read_text()

    module.write_text("def half(:\n")
    parent.send(signal.SIGKILL, pids[0])
    _, refused, *_ = await parent.tells("child.died", 2)
    assert (refused["level"], refused["how"]) == ("error", "exit code 2")
    assert "SyntaxError" in refused["reason"]
    await parent.tells("child.restart_delayed")
    await ends_completed(sql, (await client.enqueue("nap", {"seconds": 0})).id)
    module.write_text(text)
    assert (await parent.tells("child.started", 3))[-1]["child"] == 1

    module.write_text("def half(:\n")
    latest = {line["child"]: line["pid"] for line in parent.lines("child.started")}
    for pid in latest.values():
        parent.send(signal.SIGKILL, pid)
    assert await parent.ends() == 2
    [stopping] = parent.lines("supervisor.stopping")
    assert (stopping["level"], "SyntaxError" in stopping["reason"]) == ("error", True)
    assert "SyntaxError" in parent.log.splitlines()[-1]


async def test_a_setup_that_blocks_for_longer_than_a_start_may_take_is_killed(supervise: Supervise) -> None:
    parent = supervise("SetsUpForEver", startup_timeout=2.0)
    [hung, *_] = await parent.tells("child.hung")
    assert "worker_id" not in hung


async def test_whatever_a_start_hangs_in_is_named_with_its_place(
    supervise: Supervise, tmp_path: Path
) -> None:
    (tmp_path / "slow_import.py").write_text("import time\n\ntime.sleep(3600)\n")
    (tmp_path / "slow_setups.py").write_text(
        "import asyncio, time\n"
        "from jsworker import JobProcessor\n"
        "class Waits(JobProcessor):\n"
        "    async def setup(self):\n"
        "        await asyncio.get_running_loop().create_future()\n"
        "    async def process(self, job): ...\n"
        "class Builds(JobProcessor):\n"
        "    def __init__(self):\n"
        "        time.sleep(3600)\n"
        "    async def process(self, job): ...\n"
    )
    hangs = {
        "slow_import:Any": ("import of slow_import:Any", "slow_import.py, line 3"),
        "slow_setups:Waits": ("setup of kind waits (Waits)", "slow_setups.py, line 5"),
        "slow_setups:Builds": ("constructor of Builds", "slow_setups.py, line 9"),
    }
    parents = {target: supervise(target) for target in hangs}
    for target, (what, place) in hangs.items():
        [told, *_] = await parents[target].tells("setup.slow")
        assert (told["level"], told["what"]) == ("warning", what)
        assert told["place"] == f"{tmp_path / place}"
        assert told["seconds"] >= 10


@pytest.mark.thorough
async def test_a_start_that_still_hangs_is_named_again(supervise: Supervise, tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time\n\ntime.sleep(3600)\n")
    again = (await supervise("slow_import:Any").tells("setup.slow", 2, seconds=120.0))[1]
    assert again["place"] == f"{tmp_path / 'slow_import.py'}, line 3"
    assert again["seconds"] >= 20
