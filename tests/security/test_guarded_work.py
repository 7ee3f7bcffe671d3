"""Real workers and the real command line behind the shipped roles and users."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from jsworker import JobClient
from jsworker.core.errors import DatabaseRefused, TransitionRefused
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard
from tests.cli.commands import COMMAND, Cli, Result
from tests.dashboard.viewer import Viewer
from tests.ownership.rows import Sql, change_job, insert_job, read_job, seconds
from tests.security.conftest import variables
from tests.security.guarded import Guarded, make_logins, nats_user
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.servers import as_role

MakeSettings = Callable[..., Settings]
Launch = Callable[..., ParentProcess]
Run = Callable[..., Result]


@pytest.fixture
def run(
    guarded_settings: MakeSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run a command as a role of PostgreSQL and a user of NATS; workers as a process of their own."""

    def run_(database: str, nats: str, *arguments: str, **changes: Any) -> Result:
        environment = variables(guarded_settings(database, **(nats_user(nats) | changes)))
        if arguments[0] == "run":
            return as_process(environment, tmp_path, *arguments)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return Cli(capsys)(*arguments)

    return run_


def as_process(environment: Mapping[str, str], folder: Path, *arguments: str) -> Result:
    done = subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


async def becomes(sql: Sql, job_id: Any, status: str, *, within: float = 60.0) -> dict[str, Any]:
    async def there() -> dict[str, Any]:
        row = read_job(sql, job_id)
        assert row["status"] == status, row
        return row

    return await eventually(there, seconds=within)


async def test_a_worker_runs_recovers_and_prunes_with_the_least_rights(
    run: Run, launch: Launch, guarded_settings: MakeSettings, sql: Sql
) -> None:
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo", "twice", "--json")
    assert (made.code, made.err) == (0, "")
    told = json.loads(made.out)
    assert (told["stream"], told["kinds"]) == ("JOBS", ["echo", "twice"])
    old = insert_job(sql, "completed", kind="echo")
    change_job(sql, old, finished_at="2020-01-01")
    worker = launch(
        guarded_settings("worker", **nats_user("worker"), retention=3600.0, log_level="debug"),
        "Echo",
        "Twice",
    )
    await worker.ready()
    async with JobClient(guarded_settings("producer", **nats_user("producer"))) as client:
        done = await client.enqueue("echo", {"n": 1})
        aborted = await client.enqueue("twice", {})
        delayed = await client.enqueue("echo", {"n": 2}, delay=0.3)
    assert (await becomes(sql, done.id, "completed"))["result"] == {"n": 1}
    assert (await becomes(sql, aborted.id, "completed"))["stalls"] == 1
    await becomes(sql, delayed.id, "completed")
    silent = insert_job(sql, "processing", kind="echo", worker_id="gone-1-ffffffff")
    change_job(sql, silent, stale_after=seconds(0.5), crash_after=None)
    await becomes(sql, silent, "completed")
    # Its message is gone and was never there: the message of a job that waits is looked for, and sent again.
    lost = insert_job(sql, kind="echo", stream_seq=1)
    await becomes(sql, lost, "completed")
    await worker.tells("jobs.pruned")
    assert sql.execute("SELECT FROM jsworker.jobs WHERE id = %s", [old]).fetchone() is None
    assert "permissions violation" not in worker.log
    assert "permission denied" not in worker.log


async def test_who_waits_for_results_needs_to_read_them(
    run: Run, launch: Launch, guarded: Guarded, guarded_settings: MakeSettings
) -> None:
    await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo")
    worker = launch(guarded_settings("worker", **nats_user("worker")), "Echo")
    await worker.ready()
    make_logins(guarded.admin_url, {"producer": "guarded_waiter", "reader": "guarded_waiter"})
    reads = as_role(guarded.admin_url, "guarded_waiter")
    complaints: list[Any] = []
    async with JobClient(guarded_settings("producer", database_url=reads, **nats_user("producer"))) as client:
        client.events.on("*", complaints.append)
        handle = await client.enqueue("echo", {"n": 1})
        assert await handle.result(60) == {"n": 1}
    async with JobClient(guarded_settings("producer", **nats_user("producer"))) as client:
        with pytest.raises(
            DatabaseRefused, match=r"^result needs SELECT on jsworker\.jobs, which role jsworker_reader has"
        ):
            await client.result(handle.id, 60)
    assert complaints == []
    assert "permissions violation" not in worker.log


@pytest.mark.parametrize("login", ["producer", "publisher"])
async def test_an_application_enqueues_and_is_told_what_it_may_not(
    run: Run, launch: Launch, guarded_settings: MakeSettings, sql: Sql, login: str
) -> None:
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo")
    assert made.code == 0, made.err
    async with JobClient(guarded_settings(login, **nats_user("producer"))) as client:
        jobs = [
            await client.enqueue("echo", {"n": 1}, unique_key="one"),
            *await client.enqueue_many("echo", [{"n": 2}, {"n": 3}], unique_keys=["two", None]),
            *await client.enqueue_many("echo", [{"n": 4}]),
            await client.enqueue("echo", {"n": 5}, delay=0.1),
        ]
        again = await client.enqueue("echo", {}, unique_key="one")
        assert (again.id, again.created) == (jobs[0].id, False)
        assert client.unpublished_because is None
        published = await client.publish_pending()
        assert ("jsworker_publisher" in str(client.unpublished_because)) is (login == "producer")
        assert login == "publisher" or published == 0
        with pytest.raises(TransitionRefused, match="only a running job can be cleared"):
            await client.clear_and_reenqueue(jobs[0].id, "told so")
        for call in (
            client.cancel(jobs[0].id),
            client.retry(jobs[0].id),
            client.clear_and_reenqueue(insert_job(sql, "processing", kind="elsewhere"), "told so"),
        ):
            with pytest.raises(
                DatabaseRefused, match=r"^\w+ needs UPDATE on jsworker\.jobs, which role .*42501"
            ):
                await call
    row = read_job(sql, jobs[0].id)
    assert (row["needs_publish"], row["published_at"] is None) == (login == "producer", login == "producer")
    worker = launch(guarded_settings("worker", **nats_user("worker")), "Echo")
    await worker.ready()
    for job in jobs:
        await becomes(sql, job.id, "completed")
    assert sql.execute("SELECT FROM jsworker.jobs WHERE kind = 'echo' AND attempts <> 1").rowcount == 0


def test_operators_commands_work_with_the_workers_role(run: Run, sql: Sql) -> None:
    assert run("worker", "operator", "stream", "ensure", "echo").code == 0
    failed, waiting = insert_job(sql, "failed", kind="echo"), insert_job(sql, kind="echo")
    held = insert_job(sql, "processing", kind="echo")
    for arguments in (
        ["retry", str(failed)],
        ["cancel", str(waiting)],
        ["clear", str(held), "--reason", "stuck"],
        ["jobs"],
        ["job", str(held)],
        ["workers"],
        ["dead-messages"],
        ["prune", "--older-than", "60"],
        ["db", "current"],
        ["enqueue", "echo"],
    ):
        done = run("worker", "operator", *arguments)
        none = arguments[0] in ("workers", "dead-messages")
        said = f"there are no {arguments[0].replace('-', ' ')}\n" if none else ""
        assert (done.code, done.err) == (0, said), (arguments, done.err)


FIRST = "the first connection needs INSERT on jsworker.installation, which role jsworker_producer has: "
READS = "reading needs SELECT on jsworker's tables, which role jsworker_reader has: "


@pytest.mark.parametrize(
    ("database", "nats", "arguments", "line"),
    [
        ("producer", "producer", ["jobs"], f"{READS}PostgreSQL at "),
        (
            *("producer", "producer", ["retry", "00000000-0000-7000-8000-000000000000"]),
            "retry needs UPDATE on jsworker.jobs, which role jsworker_operator has: ",
        ),
        ("reader", "producer", ["enqueue", "echo"], "permission denied"),
        ("reader", "producer", ["cancel", "00000000-0000-7000-8000-000000000000"], "permission denied"),
        (
            *("worker", "producer", ["db", "upgrade"]),
            "db upgrade needs to own jsworker's tables, which role jsworker_owner has: ",
        ),
        (
            "worker",
            "worker",
            ["stream", "ensure", "echo"],
            "cannot be made; the server says: permissions viol",
        ),
        ("worker", "producer", ["run", "guarded_jobs:Echo"], "permissions violation for publish to"),
        ("worker", "worker", ["run", "guarded_jobs:Echo"], "stream JOBS cannot be made; the server says"),
        ("producer", "worker", ["run", "guarded_jobs:Echo"], "stream JOBS cannot be made; the server says"),
    ],
)
@pytest.mark.usefixtures("launch")
def test_the_wrong_role_is_told_in_one_line(
    run: Run, database: str, nats: str, arguments: list[str], line: str
) -> None:
    done = run(database, nats, *arguments)
    assert (done.code, done.out) == (1, "")
    [said] = [each for each in done.errors if not each.startswith("{")]
    assert line in said


def test_enqueue_and_prune_name_the_right_that_is_missing(run: Run, tmp_path: Path) -> None:
    assert run("worker", "operator", "stream", "ensure", "echo").code == 0
    payloads = tmp_path / "payloads.jsonl"
    payloads.write_text("{}\n")
    inserts = "enqueue needs INSERT on jsworker.jobs, which role jsworker_producer has: "
    for role, arguments, line in (
        ("reader", ["enqueue", "echo"], inserts),
        ("reader", ["enqueue", "echo", "--count", "2"], inserts),
        ("reader", ["enqueue", "echo", "--from", str(payloads)], inserts),
        (
            *("producer", ["enqueue", "echo", "--unique-key", "k", "--debounce", "5"]),
            "enqueue --debounce needs INSERT and UPDATE on jsworker.jobs, which role jsworker_debouncer ",
        ),
        ("producer", ["prune", "--older-than", "60", "--dry-run"], "prune needs SELECT on jsworker.jobs, "),
        ("operator", ["prune", "--older-than", "60"], "prune needs DELETE on jsworker.jobs, job_events and "),
    ):
        done = run(role, "producer", *arguments)
        assert done.code == 1, arguments
        assert [each for each in done.errors if each.startswith(line)], done.err


def test_commands_name_the_role_that_is_missing(run: Run) -> None:
    assert run("worker", "operator", "stream", "ensure", "echo").code == 0
    reading = (["status"], ["workers"], ["audit"], ["limits"], ["schedules"], ["workflow", "list"])
    pauses = "pause needs UPDATE on jsworker.limits, which role jsworker_operator has: "
    for role, arguments, line in (
        *(("producer", arguments, READS) for arguments in reading),
        *((role, ["pause", "echo"], pauses) for role in ("reader", "producer")),
        (
            *("producer", ["limits", "reset", "echo"]),
            "limits needs UPDATE on jsworker.limits, which role jsworker_operator has: ",
        ),
        (
            *("reader", ["dead-messages", "drop", "1"]),
            "dead-messages drop needs DELETE on jsworker.dead_messages, which role jsworker_operator has: ",
        ),
    ):
        done = run(role, "producer", *arguments)
        assert (done.code, done.out) == (1, ""), arguments
        [said] = done.errors
        assert said.startswith(f"{line}PostgreSQL at "), said


def test_readers_who_come_first_are_told_that_the_installation_has_no_id(run: Run) -> None:
    for nats, arguments in (
        ("producer", ["limits"]),
        ("producer", ["pause", "echo"]),
        ("producer", ["enqueue", "echo"]),
        ("operator", ["stream", "ensure", "echo"]),
    ):
        done = run("reader", nats, *arguments)
        assert (done.code, done.out) == (1, ""), arguments
        [said] = done.errors
        assert said.startswith(f"{FIRST}PostgreSQL at "), said
    assert run("reader", "producer", "jobs").code == 0


async def test_the_dashboard_names_the_role_that_is_missing(run: Run, guarded_settings: MakeSettings) -> None:
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo")
    assert made.code == 0, made.err
    async with (
        JobClient(guarded_settings("producer", **nats_user("producer"))) as producer,
        JobClient(guarded_settings("reader", **nats_user("producer"))) as reader,
    ):
        viewer = Viewer(dashboard(producer))
        assert READS in (await viewer.see("/jobs", 502)).text
        assert READS in (await viewer.see("/kinds/set-limits?kind=echo", 502)).text
        await viewer.http.aclose()
        viewer = Viewer(dashboard(reader))
        page = await viewer.press(await viewer.see("/kinds/pause?kind=echo"), "Pause", status=502)
        assert "pause needs UPDATE on jsworker.limits, which role jsworker_operator has: " in page.text
        question = await viewer.see("/enqueue?kind=echo")
        page = await viewer.press(question, "Enqueue", {"payload": "{}"}, status=502)
        assert "this action needs more rights, which role jsworker_operator has: " in page.text
        await viewer.http.aclose()


@pytest.mark.usefixtures("launch")
def test_a_worker_with_the_producers_role_ends_and_leaves_the_jobs_alone(run: Run, sql: Sql) -> None:
    assert run("worker", "operator", "stream", "ensure", "echo").code == 0
    waiting = insert_job(sql, kind="echo")
    done = run("producer", "worker", "run", "guarded_jobs:Echo")
    assert done.code == 1
    assert "permission denied for table" in done.err
    assert read_job(sql, waiting)["status"] == "queued"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stream", "ensure"], "Missing argument 'KIND'"),
        (["stream", "ensure", "Bad.Kind"], "kind 'Bad.Kind' must match"),
        (["stream", "ensure", "nowhere:Echo"], "there is no module nowhere"),
        (["stream", "sideways"], "No such command 'sideways'"),
    ],
)
def test_wrong_arguments_of_the_stream_command(run: Run, arguments: list[str], line: str) -> None:
    done = run("worker", "operator", *arguments)
    assert (done.code, done.out) == (2, "")
    [said] = done.errors
    assert line in said


def test_the_stream_command_tells_what_it_did_and_does_nothing_twice(run: Run) -> None:
    first = run("worker", "operator", "stream", "ensure", "echo")
    assert first.lines[0].startswith("stream JOBS: created none -> ")
    assert first.lines[-1] == "stream JOBS is ready for echo"
    again = run("worker", "operator", "stream", "ensure", "echo", "echo", ack_wait=6.0)
    assert again.lines == [
        "consumer echo of stream JOBS: ack_wait 5 -> 6",
        "stream JOBS is ready for echo",
    ]
    assert run("worker", "operator", "stream", "ensure", "echo", ack_wait=6.0).lines == [
        "stream JOBS is ready for echo"
    ]


@pytest.mark.parametrize("lanes", [(), ("--lanes",)], ids=["without lanes", "with lanes"])
async def test_jobs_of_every_priority_run_with_the_least_rights(
    run: Run, launch: Launch, guarded_settings: MakeSettings, sql: Sql, lanes: tuple[str, ...]
) -> None:
    """Without a consumer, which the worker may not make, the table brings the job; the worker stays ready."""
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo", *lanes)
    assert made.code == 0, made.err
    worker = launch(guarded_settings("worker", **nats_user("worker"), log_level="debug"), "Echo")
    await worker.ready()
    async with JobClient(guarded_settings("producer", **nats_user("producer"))) as client:
        jobs = [await client.enqueue("echo", {}, priority=each) for each in ("high", "low")]
        assert client.unpublished_because is None
    for priority, job in zip((0, 2), jobs, strict=True):
        assert (await becomes(sql, job.id, "completed"))["priority"] == priority
    await worker.ready()
    assert ("permissions violation" in worker.log) is not bool(lanes)
    assert "permission denied" not in worker.log


async def test_operators_enqueue_and_readers_look_where_nats_is_set(
    run: Run, guarded_settings: MakeSettings
) -> None:
    """Who may not make the id of the installation finds it."""
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo")
    assert made.code == 0, made.err
    async with JobClient(guarded_settings("operator", **nats_user("producer"))) as client:
        job = await client.enqueue("echo", {"n": 1})
    async with JobClient(guarded_settings("reader", **nats_user("producer"))) as client:
        viewer = Viewer(dashboard(client))
        await viewer.see("/")
        await viewer.see(f"/jobs/{job.id}")
        await viewer.http.aclose()


async def test_the_dashboard_reads_as_the_role_that_it_is_told(
    guarded: Guarded, guarded_settings: MakeSettings, sql: Sql
) -> None:
    """Its login may act, as a member of one role, and reads with the rights of another."""
    login = "guarded_dashboard"
    for role in ("operator", "reader"):
        make_logins(guarded.admin_url, {role: login})
    own = as_role(guarded.admin_url, login)
    settings = Settings(database_url=own, statement_timeout=5.0)
    job_id, whoami = insert_job(sql, "failed"), text("SELECT CAST(CURRENT_USER AS text) AS role")
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client, read_role="jsworker_reader"))
        for address in (
            "/",
            "/jobs",
            f"/jobs/{job_id}",
            "/failures",
            "/kinds",
            "/keys",
            "/workers",
            "/audit",
        ):
            await viewer.see(address)
        question = await viewer.see(f"/jobs/{job_id}/retry")
        await viewer.press(question, "Retry")
        [read] = await client.database.for_reading(seconds=9.0, role="jsworker_reader").run(whoami)
        [acted] = await client.database.run(whoami)
        assert (read.role, acted.role) == ("jsworker_reader", login)
        other = Viewer(dashboard(client, read_role="jsworker_metrics"))
        for address in ("/jobs", "/jobs/cancel?all=yes", "/kinds/set-limits?kind=echo"):
            assert "permission denied to set role" in (await other.see(address, 502)).text
        missing = Viewer(dashboard(client, read_role="No such"))
        assert 'role "No such" does not exist' in (await missing.see("/jobs", 502)).text
        for each in (viewer, other, missing):
            await each.http.aclose()
    assert read_job(sql, job_id)["status"] == "queued"


async def test_the_doctors_page_judges_a_login_by_what_a_dashboard_needs(
    guarded: Guarded, guarded_settings: MakeSettings, run: Run, sql: Sql
) -> None:
    login = "guarded_looks"
    make_logins(guarded.admin_url, {"reader": login})
    sql.execute(f"ALTER ROLE {login} SET default_transaction_read_only = on".encode())  # as logins.sql does
    made = await asyncio.to_thread(run, "worker", "operator", "stream", "ensure", "echo")
    assert made.code == 0, made.err
    settings = guarded_settings(
        "reader", database_url=as_role(guarded.admin_url, login), **nats_user("producer")
    )
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client))
        text = (await viewer.see("/doctor?examine=yes")).text
        await viewer.http.aclose()
    assert f"ok rights role {login} may read" in text
    assert "ok connection" in text
    assert f"role {login} lacks" not in text


@pytest.mark.parametrize("login", ["reader", "producer", "operator"])
def test_the_doctor_offers_a_login_that_is_no_workers_no_more_rights(login: str, run: Run) -> None:
    made = run("worker", "operator", "stream", "ensure", "echo")
    assert made.code == 0, made.err
    found = run(login, "operator", "doctor", "--json")
    assert found.code == 1
    [rights] = [each for each in found.json if each["check"] == "postgresql.rights"]
    assert rights["level"] == "error"
    assert f"jsworker_{login}, and may not do all that a worker does" in rights["says"]
    assert rights["do"].startswith("Let JSWORKER_DATABASE_URL name the login of a worker")
    assert "GRANT" not in found.out
    assert "ALTER ROLE" not in found.out
