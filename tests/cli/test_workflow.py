"""``jsworker workflow``: the tree with its progress, the list, cancel and retry."""

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, read_value

from .commands import Cli, Spawn, wait_until

pytestmark = pytest.mark.usefixtures("sql")


def enqueued() -> UUID:
    async def enqueue() -> UUID:
        assert os.environ["JSWORKER_DATABASE_URL"]
        async with JobClient.from_env() as client, client.workflow("nightly run") as flow:
            parts = flow.batch("count", [{"n": number} for number in range(4)], name="parts")
            rates = flow.job("fetch", {})
            merge = flow.job("merge", {}, after=[parts, rates])
            flow.job("send", {}, after=merge, on_failure="run")
        return flow.id

    return asyncio.run(enqueue())


def test_a_workflow_is_drawn_as_a_tree(cli: Cli, sql: Sql) -> None:
    workflow = enqueued()
    sql.execute(
        "UPDATE jsworker.jobs SET status = 'completed', attempts = 1, finished_at = now(),"
        " needs_publish = false"
        " WHERE id IN (SELECT id FROM jsworker.jobs WHERE kind = 'count' ORDER BY id LIMIT 2)"
    )
    lines = cli("workflow", str(workflow)).ok().lines
    assert lines[0].startswith(f"nightly run {workflow} running, since ")
    assert [line.rstrip() for line in lines[1:]] == [
        "├── parts (count) ━━━━━━━━━━────────── 2/4 running",
        "└── fetch ──────────────────── 0/1 running",
        "    └── merge ──────────────────── 0/1 waiting, after parts, fetch",
        "        └── send ──────────────────── 0/1 waiting",
    ]
    found = cli("workflow", str(workflow), "--json").ok().json
    assert (found["name"], found["status"], found["id"]) == ("nightly run", "running", str(workflow))
    assert found["nodes"][0]["jobs"] == {"completed": 2, "queued": 2}
    assert found["nodes"][2]["needs"] == ["parts", "fetch"]
    assert cli("workflow", "show", str(workflow), "--json").ok().json["nodes"] == found["nodes"]


@pytest.mark.parametrize("columns", [60, 80])
def test_every_node_of_a_long_chain_is_shown_on_a_narrow_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    async def enqueue() -> UUID:
        async with JobClient.from_env() as client, client.workflow("chain") as flow:
            last = flow.job("step-0", {})
            for number in range(1, 40):
                last = flow.job(f"step-{number}", {}, after=last)
        return flow.id

    workflow = asyncio.run(enqueue())
    monkeypatch.setenv("COLUMNS", str(columns))
    text = " ".join(cli("workflow", str(workflow)).ok().out.split())
    for number in range(40):
        assert f"── step-{number} ───" in text
    assert "0/1 waiting, after step-38" in text


def test_the_list_shows_whole_names_on_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = enqueued()
    monkeypatch.setenv("COLUMNS", "60")
    assert cli("workflow", "list").ok().lines == [f"{workflow}  running  0 of 4", "    nightly run"]


def test_a_circle_that_others_have_written_is_drawn_all_the_same(cli: Cli, sql: Sql) -> None:
    workflow = enqueued()
    sql.execute(
        "INSERT INTO jsworker.batch_needs (batch, needs) SELECT one.id, two.id"
        " FROM jsworker.batches AS one, jsworker.batches AS two"
        " WHERE one.name = 'fetch' AND two.name = 'send'"
    )
    lines = cli("workflow", str(workflow)).ok().lines
    names = sorted(line.strip("│├└─ ").split()[0] for line in lines[1:])
    assert names == ["fetch", "merge", "parts", "send"]


def test_list_cancel_and_retry(cli: Cli, sql: Sql) -> None:
    workflow = enqueued()
    [listed] = cli("workflow", "list", "--json").ok().json
    assert (listed["id"], listed["nodes"], listed["nodes_finished"]) == (str(workflow), 4, 0)
    table = cli("workflow", "list").ok().lines
    assert table[0].split() == ["ID", "NAME", "STATUS", "NODES", "ENQUEUED", "FINISHED"]
    assert "0 of 4" in table[1]
    said = cli("workflow", "retry", str(workflow)).refused(1)
    assert said == f"workflow {workflow} runs, and none of its jobs has failed; it cannot be retried"
    sql.execute(
        "UPDATE jsworker.jobs SET status = 'failed', attempts = 1, errors = 1, finished_at = now(),"
        " failure_reason = 'attempts', last_error = 'ValueError: broken', needs_publish = false"
        " WHERE kind = 'fetch'"
    )
    lines = cli("workflow", str(workflow)).ok().lines
    assert "━━━━━━━━━━━━━━━━━━━━ 1/1 running (1 failed)" in lines[2]
    assert lines[-1].startswith("fetch: job ")
    assert lines[-1].endswith("failed: ValueError: broken")
    assert cli("workflow", "retry", str(workflow)).ok().lines == ["retried 1"]
    assert cli("workflow", "cancel", str(workflow)).ok().lines == ["cancelled 7, asked 0 running to stop"]
    assert "cancelled" in cli("workflow", str(workflow)).ok().lines[0]


HOLD = """CREATE FUNCTION jsworker.hold() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NULL; END $$"""
HOLD_CANCELS = """CREATE TRIGGER hold AFTER UPDATE OF cancel_requested ON jsworker.jobs
FOR EACH STATEMENT EXECUTE FUNCTION jsworker.hold()"""
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
def held(sql: Sql, cli_environment: Mapping[str, str]) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Keeps every cancellation from ending until this connection lets go of its lock."""
    sql.execute(HOLD)
    sql.execute(HOLD_CANCELS)
    holder = psycopg.connect(cli_environment["JSWORKER_DATABASE_URL"], autocommit=True)
    holder.execute("SELECT pg_advisory_lock(42)")
    yield holder
    holder.close()
    sql.execute("DROP FUNCTION jsworker.hold() CASCADE")


def test_ctrl_c_while_a_workflow_is_cancelled_tells_what_was_done(
    spawn: Spawn, cli: Cli, sql: Sql, held: psycopg.Connection[tuple[Any, ...]]
) -> None:
    async def enqueue() -> UUID:
        async with JobClient.from_env() as client, client.workflow("large") as flow:
            flow.batch("count", [{}] * 1200)
        return flow.id

    workflow = asyncio.run(enqueue())
    process = spawn("workflow", "cancel", str(workflow))
    wait_until(lambda: read_value(sql, HELD), "a batch is being cancelled")
    process.signal(signal.SIGINT)
    said = process.read_errors_until("stopping")
    assert "stopping after this batch; workers cancel the jobs that are left" in said
    held.execute("SELECT pg_advisory_unlock(42)")
    found = process.wait()
    assert (found.code, found.out) == (130, "cancelled 500, asked 0 running to stop\n")
    assert read_value(sql, "SELECT count(*) FROM jsworker.jobs WHERE status = 'cancelled'") == 500
    assert cli("workflow", str(workflow), "--json").ok().json["status"] == "cancelling"


def test_a_cancelled_workflow_says_what_was_done_before(cli: Cli, sql: Sql) -> None:
    workflow = enqueued()
    sql.execute(
        "UPDATE jsworker.jobs SET status = 'completed', attempts = 1, finished_at = now(),"
        " needs_publish = false"
        " WHERE id IN (SELECT id FROM jsworker.jobs WHERE kind = 'count' ORDER BY id LIMIT 1)"
    )
    cli("workflow", "cancel", str(workflow)).ok()
    sql.execute("UPDATE jsworker.batches SET outcome = 'cancelled', finished_at = now()")
    sql.execute("UPDATE jsworker.workflows SET outcome = 'failed', finished_at = now()")
    lines = cli("workflow", str(workflow)).ok().lines
    assert lines[0].startswith(f"nightly run {workflow} failed, cancelled by an operator, took ")
    assert lines[1].endswith(" 4/4 (1 completed, 3 cancelled)")
    assert lines[2].endswith(" 1/1 cancelled")
    assert lines[3].endswith(" 1/1 cancelled, after parts, fetch")
    sql.execute("UPDATE jsworker.workflows SET outcome = 'cancelled'")
    assert " cancelled by an operator, took " in cli("workflow", str(workflow)).ok().lines[0]


def test_a_job_tells_to_which_workflow_it_belongs(cli: Cli, sql: Sql) -> None:
    workflow = enqueued()
    row = sql.execute("SELECT id FROM jsworker.jobs WHERE kind = 'merge'").fetchone()
    assert row is not None
    lines = cli("job", str(row["id"])).ok().lines
    assert any(
        line.split() == ["workflow", "nightly", "run", f"{workflow},", "node", "merge"] for line in lines
    )
    assert any("held" in line or "waits" in line for line in lines)
    found = cli("job", str(row["id"]), "--json").ok().json
    assert found["workflow"] == {"workflow": str(workflow), "name": "nightly run", "node": "merge"}


def test_unknown_workflows(cli: Cli) -> None:
    assert cli("workflow", "nightly").refused(1) == "no workflow has id 'nightly'"
    unknown = "01a20f47-e801-7589-9415-c0d406396231"
    assert cli("workflow", unknown).refused(1) == f"no workflow has id {unknown}"
    assert cli("workflow", "cancel", unknown).refused(1) == f"there is no workflow {unknown}"
    assert cli("workflow", "list").code == 0
