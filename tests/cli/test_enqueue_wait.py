"""``jsworker enqueue --wait``: the result on stdout, and how the job ended as the exit code."""

import signal

import pytest

from tests.ownership.rows import Sql, read_value

from .commands import Cli, Spawn

IN_TIME = ("--wait", "--timeout", 60)
UNSERVED = "no live worker serves kind double: is it spelled right?"


@pytest.mark.usefixtures("here", "sql")
def test_a_result_and_an_error(cli: Cli, spawn: Spawn) -> None:
    spawn("run", "cli_jobs:Double", "cli_jobs:Boom", "--log-format", "json").read_errors_until(
        "worker.started"
    )
    assert cli("enqueue", "double", "--payload", '{"n": 21}', *IN_TIME).ok().lines == ["42"]
    [one] = cli("enqueue", "double", "--payload", '{"n": 1}', *IN_TIME, "--json").ok().json
    assert (one["created"], one["result"], one["status"], len(one["id"])) == (True, 2, "completed", 36)
    assert cli("enqueue", "double", "--payload", '{"n": 2}', "--wait").ok().lines == ["4"]
    said = cli("enqueue", "boom", *IN_TIME).refused(3)
    assert "failed (attempts): ValueError: boom" in said
    failed = cli("enqueue", "boom", *IN_TIME, "--json")
    [one] = failed.json
    assert (failed.code, one["status"], one["reason"]) == (3, "failed", "attempts")
    assert one["error"].startswith("ValueError: boom")
    assert set(one) == {"id", "created", "status", "reason", "error"}


def test_one_that_has_not_ended_in_time(cli: Cli, sql: Sql) -> None:
    done = cli("enqueue", "double", "--wait", "--timeout", 0.1)
    job_id = read_value(sql, "SELECT id FROM jsworker.jobs")
    assert (done.code, done.out) == (4, "")
    assert done.errors == [UNSERVED, f"job {job_id} has not ended within 0.1 s"]
    again = cli("enqueue", "other", "--unique-key", "k", "--wait", "--timeout", 0.1, "--json")
    assert (again.code, again.json[0]["created"]) == (4, True)


def test_one_that_is_cancelled(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    waiting = spawn("enqueue", "double", "--unique-key", "k", "--wait")
    job_id = None
    while job_id is None:
        rows = sql.execute("SELECT id FROM jsworker.jobs").fetchall()
        job_id = rows[0]["id"] if rows else None
    cli("cancel", job_id).ok()
    ended = waiting.wait()
    assert (ended.code, ended.out, ended.errors) == (3, "", [UNSERVED, f"job {job_id} was cancelled"])


def test_ctrl_c_names_the_job_that_goes_on(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    [job_id] = cli("enqueue", "double", "--unique-key", "k").lines
    waiting = spawn("enqueue", "double", "--unique-key", "k", "--wait")
    waiting.read_errors_until("nothing was enqueued")
    waiting.signal(signal.SIGINT)
    ended = waiting.wait()
    assert (ended.code, ended.out, ended.errors) == (130, "", [f"job {job_id} goes on"])
    assert read_value(sql, "SELECT status FROM jsworker.jobs") == "queued"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--wait", "--count", 2], "--wait is for one job, not for --count 2"),
        (["--timeout", 5], "--timeout needs --wait"),
        (["--wait", "--timeout", 0], "--timeout 0 must be more than 0 and at most 1000000000 seconds"),
        (["--wait", "--timeout", "nan"], "--timeout nan must be more than 0 and at most 1000000000 seconds"),
        (["--wait", "--timeout=-1"], "--timeout -1 must be more than 0 and at most 1000000000 seconds"),
    ],
)
def test_what_makes_no_sense(cli: Cli, sql: Sql, arguments: list[object], said: str) -> None:
    assert cli("enqueue", "double", *arguments).refused(2) == said
    assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 0
