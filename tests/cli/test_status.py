"""``status``: what waits, runs and fails, what is shown again and again, and how listings go on."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from jsworker.ownership.queries import status as status_query
from tests.ownership.rows import HELD, NOW, Sql, ago, change_job, insert_job

from .commands import Cli, Terminal, as_if_at_once


def insert_worker(sql: Sql, name: str, *, state: str = "running", silent: float = 0.0) -> None:
    sql.execute(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state, last_seen_at) VALUES (%s, 'host', 1, '{double}', 10, '1', '5 s', %s,"
        " now() - make_interval(secs => %s))",
        [name, state, silent],
    )


@pytest.fixture
def jobs(sql: Sql) -> Sql:
    """Jobs of two kinds in every state, and workers of one."""
    for _ in range(3):
        insert_job(sql, "queued", kind="double", queued_at=ago(90))
    insert_job(sql, "scheduled", kind="double")
    insert_job(sql, "scheduled", kind="double", **HELD)
    insert_job(sql, "processing", kind="double", worker_id="w-1", claimed_at=ago(30))
    insert_job(sql, "completed", kind="double")
    insert_job(sql, "failed", kind="shout", finished_at=ago(400), created_at=ago(400))
    insert_job(sql, "queued", kind="shout")
    insert_worker(sql, "w-1")
    insert_worker(sql, "w-2", state="draining")
    insert_worker(sql, "w-3", silent=3600)
    insert_worker(sql, "w-4", state="stopped")
    return sql


@pytest.mark.usefixtures("jobs")
class TestStatus:
    def test_the_table_that_one_wants_first(self, cli: Cli) -> None:
        lines = [as_if_at_once(line) for line in cli("status").ok().lines]
        header, double, shout = (line.split() for line in lines[:3])
        assert header[:7] == ["KIND", "QUEUED", "OLDEST", "RUNNING", "LATER", "HELD", "FAILED"]
        assert double == ["double", "3", "2m", "1", "1", "1", "0", "1.4", "0.2", "1"]
        assert shout == ["shout", "1", "0s", "0", "0", "0", "1", "0.2", "0"]
        assert lines[3:] == [
            "",
            "workers: 2 alive, 1 draining, 1 silent; 1 of 10 job slots in use",
            "held by limit: double 1 (for 0s)",
        ]

    def test_a_narrow_terminal_shows_less(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        lines = cli("status").ok().lines
        assert max(map(len, lines)) <= 80
        assert lines[0].split()[:4] == ["KIND", "QUEUED", "OLDEST", "RUNNING"]
        assert "IN/MIN" not in lines[0]
        assert lines[0].split()[-1] == "WORKERS"

    def test_as_json(self, cli: Cli) -> None:
        found = cli("status", "--output", "json").ok().json
        double, shout = found["kinds"]
        assert (double["kind"], double["queued"], double["running"], double["workers"]) == ("double", 3, 1, 1)
        assert 90 <= double["oldest_seconds"] < 900
        assert double["held"]["limit"]["jobs"] == 1
        assert double["per_minute"]["completed"] == pytest.approx(0.2)
        assert (shout["failed"], shout["per_minute"]["failed"]) == (1, 0.0)
        assert (found["bound"], found["after"]) == (10_000, None)
        assert found["workers"] == {
            "alive": 2,
            "draining": 1,
            "drained": 0,
            "silent": 1,
            "slots": 10,
            "busy": 1,
        }

    def test_what_is_paused_and_what_somebody_should_look_at(self, cli: Cli, jobs: Sql) -> None:
        assert cli("pause", "double", "--reason", "the bank is closed").code == 0
        insert_job(jobs, "queued", needs_publish=True, publish_after=ago(60))
        lines = cli("status").ok().lines
        [paused] = [line for line in lines if line.startswith("paused: double since ")]
        assert paused.endswith(": the bank is closed")
        assert "not published: 1, the oldest for 1m: `jsworker doctor` tells why" in lines
        assert cli("resume", "double").code == 0

    def test_a_paused_kind_is_named_however_many_keys_are(self, cli: Cli, jobs: Sql) -> None:
        assert cli("pause", "double").code == 0
        jobs.execute(
            "INSERT INTO jsworker.limits (kind, key, paused_at)"
            " SELECT 'shout', 'tenant-' || n, now() + interval '1 s' FROM generate_series(1, 30) AS n"
        )
        named = [line for line in cli("status").ok().lines if line.startswith("paused: ")]
        assert named[0].startswith("paused: double since ")
        assert len(named) == 20
        assert cli("resume", "double").code == 0

    def test_kinds_are_paged(self, cli: Cli) -> None:
        found = cli("status", "--limit", 1)
        assert [line.split()[0] for line in found.lines[1:2]] == ["double"]
        assert found.errors == ["there may be more: jsworker status --limit 1 --after double"]
        assert [line.split()[0] for line in cli("status", "--after", "double").ok().lines[1:2]] == ["shout"]

    def test_counting_ends_at_a_bound(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        text = status_query.COUNTS.text.replace(f"LIMIT {status_query.BOUND}", "LIMIT 2")
        monkeypatch.setattr(status_query, "COUNTS", type(status_query.RUNNING)(text))
        monkeypatch.setattr("jsworker.cli.status.BOUND", 2)
        assert cli("status").ok().lines[1].split()[:2] == ["double", "2+"]

    def test_rates_of_more_jobs_than_are_read_are_those_of_their_time(
        self, cli: Cli, jobs: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        change_job(jobs, insert_job(jobs, "completed", kind="double"), finished_at=ago(20))
        monkeypatch.setattr(status_query, "RATE_JOBS", 2)
        found = cli("status", "--json").ok().json
        assert 20 <= found["rate_seconds"]["ended"] < 200
        assert found["kinds"][0]["per_minute"]["completed"] > 0.4


@pytest.mark.usefixtures("sql")
def test_status_without_anything(cli: Cli) -> None:
    found = cli("status")
    told = "no job waits, runs, has failed or ended within five minutes, and no worker is there\n"
    assert (found.code, found.err) == (0, told)


def test_a_kind_is_shown_while_it_has_rates(cli: Cli, sql: Sql) -> None:
    insert_job(sql, "completed", kind="double")
    insert_job(sql, "completed", kind="shout", created_at=ago(4000), finished_at=ago(400))
    lines = cli("status").ok().lines
    assert lines[1].split() == ["double", "0", "0", "0", "0", "0", "0.2", "0.2", "0"]
    assert lines[2] == ""
    assert cli("status", "--after", "double").err.startswith("no job of a kind behind double waits")


class TestWatch:
    @pytest.mark.parametrize("command", ["jobs", "status"])
    def test_it_is_shown_again_until_ctrl_c(
        self, command: str, sql: Sql, cli_environment: Mapping[str, str], tmp_path: Path
    ) -> None:
        first, then = ("queued", "cancelled") if command == "jobs" else (r"\b1\b", r"\b0\b")
        job_id = insert_job(sql, "queued", kind="double")
        terminal = Terminal(
            command, "--watch", "--interval", 0.2, cwd=tmp_path, environment=dict(cli_environment)
        )
        terminal.read_until(f"double.*{first}")
        change_job(sql, job_id, status="cancelled", finished_at=NOW)
        insert_job(sql, "failed", kind="double")
        terminal.read_until(f"double.*{then}")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text

    def test_it_needs_a_terminal_and_no_json(self, cli: Cli) -> None:
        assert cli("jobs", "--watch").refused(2) == "--watch needs a terminal"
        assert cli("jobs", "--watch", "--json").refused(2) == "--watch shows a table: it goes without --json"


class TestPages:
    def test_the_next_page_is_told_as_a_command(self, cli: Cli, sql: Sql) -> None:
        ids = [insert_job(sql, "failed", kind="double") for _ in range(3)]
        found = cli("jobs", "--status", "failed", "--limit", 2)
        assert found.errors == [
            f"there may be more: jsworker jobs --status failed --limit 2 --after {ids[1]}"
        ]
        found = cli(*found.errors[0].partition("jsworker ")[2].split())
        assert [line.split()[0] for line in found.lines[1:]] == [str(ids[0])]

    def test_an_earlier_place_is_not_told_again(self, cli: Cli, sql: Sql) -> None:
        ids = [insert_job(sql, "failed") for _ in range(3)]
        for after in (["--after", ids[2]], [f"--after={ids[2]}"]):
            found = cli("jobs", "--status", "failed", "--limit", 1, *after)
            assert found.errors[0].endswith(f"jobs --status failed --limit 1 --after {ids[1]}")

    def test_workers(self, cli: Cli, sql: Sql) -> None:
        for number in range(3):
            insert_worker(sql, f"w-{number}", silent=60 * number)
        found = cli("workers", "--limit", 2)
        assert found.errors == ["there may be more: jsworker workers --limit 2 --after w-1"]
        assert [line.split()[0] for line in cli("workers", "--after", "w-1").ok().lines[1:]] == ["w-2"]

    @pytest.mark.usefixtures("sql")
    def test_schedules_and_limits(self, cli: Cli) -> None:
        for name in ("a", "b"):
            assert cli("schedules", "add", name, "double", "--every", 3600).code == 0
            assert cli("limits", "set", name, "--running", 1).code == 0
        found = cli("schedules", "list", "--limit", 1)
        assert found.errors == ["there may be more: jsworker schedules list --limit 1 --after a"]
        assert [line.split()[0] for line in cli("schedules", "list", "--after", "a").ok().lines[1:]] == ["b"]
        found = cli("limits", "list", "--limit", 1)
        assert found.errors == ["there may be more: jsworker limits list --limit 1 --after a:"]
        assert [line["kind"] for line in cli("limits", "list", "--after", "a:", "--json").ok().json] == ["b"]
        line = cli("schedules", "list", "--after", "c").refused(2)
        assert line == "--after 'c': the listing holds no such line"


@pytest.mark.usefixtures("sql")
class TestOutput:
    @pytest.mark.parametrize("command", [["jobs"], ["workers"], ["schedules", "list"], ["limits"]])
    def test_json_by_either_option(self, command: list[str], cli: Cli) -> None:
        assert cli(*command, "--output", "json").ok().json == cli(*command, "--json").ok().json
        assert cli(*command, "--json", "--output", "json").code == 0
        assert cli(*command, "--output", "table").out == cli(*command).out

    def test_contradictions_and_other_forms_are_refused(self, cli: Cli) -> None:
        line = cli("jobs", "--json", "--output", "table").refused(2)
        assert line == "--json and --output table: one of them"
        assert "'xml' is not one of 'table', 'json'" in cli("jobs", "--output", "xml").refused(2)


class TestCompletion:
    def test_commands_are_completed(self, tmp_path: Path) -> None:
        terminal = Terminal(
            cwd=tmp_path,
            environment={
                "PATH": "/usr/bin:/bin",
                "_JSWORKER_COMPLETE": "complete_bash",
                "COMP_WORDS": "jsworker sta",
                "COMP_CWORD": "1",
            },
        )
        terminal.wait()
        assert "status" in terminal.plain_text.split()
