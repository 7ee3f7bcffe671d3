"""``jobs``, ``job`` and ``workers``: what an operator sees."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.sql import SQL

from jsworker.ownership.queries import listing
from tests.ownership.rows import HELD, NOW, Sql, ago, insert_job, seconds, set_clock_ahead

from .commands import Cli, Keyboard, Terminal, as_if_at_once

COLUMNS = {
    *("id", "kind", "status", "worker_id", "fencing_token", "attempts", "errors", "stalls", "max_attempts"),
    *("max_stalls", "stage", "progress", "message", "unique_key", "run_at", "queued_at", "claimed_at"),
    *("last_activity_at", "deadline_at", "cleared", "clear_reason", "cancel_requested", "last_error"),
    *("failure_reason", "created_at", "started_at", "finished_at", "progress_at", "refused", "priority"),
    *("held_by", "held_at", "due_at", "limit_key", "expires_at", "waiting_key", "behind", "debounce_until"),
    "batch_id",
}


def insert_worker(sql: Sql, worker_id: str, *, kinds: str = "{double,boom}", state: str = "running") -> None:
    sql.execute(
        """
        INSERT INTO jsworker.workers (
          id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)
        VALUES (%s, 'alpha', 1, %s, 10, '0.1.0', '5 s', %s)
        """,
        [worker_id, kinds, state],
    )


@pytest.mark.parametrize("hours", [3, -3])
def test_ages_are_by_postgresqls_clock(
    cli: Cli, database_url: str, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", database_url)
    monkeypatch.delenv("JSWORKER_NATS_URL")  # the stream belongs to the database of the other tests
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        set_clock_ahead(connection, hours * 3600)
        job_id = insert_job(connection, "queued", created_at=ago(1500), queued_at=ago(1500))
        connection.execute(
            SQL(
                "INSERT INTO jsworker.schedules"
                " (name, kind, payload, rule, tz, missed, overlap, next_at, set_by)"
                " VALUES ('s', 'double', '{{}}', 'every 1d', 'UTC', 'skip', 'allow', {}, 'operator')"
            ).format(ago(-1500))
        )
    assert " 25m " in cli("jobs").ok().out
    assert "waits since 25m" in cli("job", str(job_id)).ok().out
    assert " 25m " in cli("schedules").ok().out


class TestJobs:
    def test_jobs_are_listed_the_newest_first_with_what_matters(self, cli: Cli, sql: Sql) -> None:
        rows: dict[str, dict[str, Any]] = {
            "scheduled": {"run_at": ago(-7200.5), "last_error": "OSError: full\nTraceback"},
            "queued": {"cleared": True, "clear_reason": "node drained", "max_attempts": 3},
            "processing": {
                "stage": "clone",
                "progress": 0.25,
                "message": "half\nway",
                "cancel_requested": True,
            },
            "completed": {"claimed_at": ago(90)},
            "failed": {"last_error": "ValueError: no\nTraceback"},
            "cancelled": {},
        }
        ids = {state: insert_job(sql, state, **columns) for state, columns in rows.items()}
        unserved = "no live worker serves its kind"
        running = "alpha-1-aaaa, running for 0s, heartbeat 0s ago, clone 25%, half\\nway, asked to stop"
        found = cli("jobs").ok()
        assert found.lines[0].split() == ["ID", "KIND", "STATUS", "TRY", "AGE", "DETAIL"]
        lines = [as_if_at_once(" ".join(line.split())) for line in found.lines[1:]]
        assert lines == [
            f"{ids['cancelled']} count-lines cancelled 0/- 0s",
            f"{ids['failed']} count-lines failed 1/- 0s attempts: ValueError: no",
            f"{ids['completed']} count-lines completed 1/- 0s took 2m",
            f"{ids['processing']} count-lines processing 1/3 0s {running}",
            f"{ids['queued']} count-lines queued 0/3 0s {unserved}, returned: node drained",
            f"{ids['scheduled']} count-lines scheduled 0/- 0s due in 2h, OSError: full",
        ]

    def test_what_a_held_job_waits_for_is_told(self, cli: Cli, sql: Sql) -> None:
        held = insert_job(sql, "scheduled", **HELD | {"held_at": ago(7200.5)}, limit_key="tenant-7")
        other = insert_job(sql, "scheduled", **HELD | {"held_by": "needs"}, due_at="2090-01-01Z")
        out = cli("jobs", "--status", "scheduled").ok().out
        assert "held by limit of tenant-7 for 2h" in out
        assert "waits for the jobs that it needs" in out
        assert "scheduled: held by limit of tenant-7 for 2h" in cli("job", held).ok().out
        assert re.search(
            r"scheduled: waits for the jobs that it needs for \d+s; not before 20", cli("job", other).ok().out
        )
        found = {job["id"]: job for job in cli("jobs", "--json").ok().json}
        assert (found[str(held)]["held_by"], found[str(held)]["limit_key"]) == ("limit", "tenant-7")
        assert ["limit", "key", "tenant-7"] in [line.split() for line in cli("job", held).ok().lines]

    def test_short_runs_are_shown_in_milliseconds(self, cli: Cli, sql: Sql) -> None:
        insert_job(sql, "completed", claimed_at=ago(0.5), finished_at=ago(0.47))
        assert " took 30ms" in cli("jobs").ok().out

    def test_jobs_can_be_filtered(self, cli: Cli, sql: Sql) -> None:
        failed = insert_job(sql, "failed")
        other = insert_job(sql, "failed", kind="other")
        insert_job(sql, "queued", kind="other")
        both = cli("jobs", "--status", "failed", "--json").ok().json
        assert [job["id"] for job in both] == [str(other), str(failed)]
        one = cli("jobs", "--status", "failed", "--kind", "other", "--json").ok().json
        assert [job["id"] for job in one] == [str(other)]

    @pytest.mark.parametrize("columns", [None, 180])
    def test_a_kind_is_whole_where_there_is_room(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, columns: int | None
    ) -> None:
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        insert_job(sql, kind="k" * 64)
        assert f" {'k' * 64} " in cli("jobs").ok().out

    @pytest.mark.usefixtures("sql")
    def test_that_there_are_none_is_said(self, cli: Cli) -> None:
        assert cli("jobs").err == "no jobs were found\n"
        assert cli("jobs", "--kind", "tyop").err == "no jobs of kind tyop were found\n"
        assert cli("jobs", "--json").ok().json == []
        assert cli("workers").err == "there are no workers\n"

    def test_json_has_the_columns_without_payload_and_result(self, cli: Cli, sql: Sql) -> None:
        insert_job(sql, "completed", payload='{"secret": 1}', result='{"secret": 2}')
        [job] = cli("jobs", "--json").ok().json
        assert job.keys() == COLUMNS
        assert job["created_at"].endswith("Z")
        assert job["status"] == "completed"

    def test_json_has_the_priority_as_a_client_gives_it(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, priority=0)
        for found in (cli("jobs", "--json").ok().json[0], cli("job", job_id, "--json").ok().json):
            assert found["priority"] == "high"

    def test_what_a_job_waits_for_that_was_handed_back_is_told(self, cli: Cli, sql: Sql) -> None:
        why = "payload of job 1: is encoded with key 2026-02 of codec aes-gcm, which is not here"
        job_id = insert_job(sql, "scheduled", cleared=True, clear_reason=why, run_at=ago(-7200.5))
        told = " ".join(cli("jobs").ok().out.split())
        assert f"due in 2h, returned: {why}" in told
        told = " ".join(cli("job", job_id).ok().out.split())
        assert re.search(f"in 2h, at .*; returned: {why}", told)

    def test_what_postgresql_refuses_is_told(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(-7200.5))
        sql.execute(
            "INSERT INTO jsworker.refused_rows (job_id, attempted, kind, status, fencing_token, dispatch,"
            " sqlstate, constraint_name, retry_at) VALUES (%s, 'promote', 'count-lines', 'scheduled', 0, 0,"
            " '23514', 'their_rule', clock_timestamp() + interval '2 hours')",
            [job_id],
        )
        says = "PostgreSQL refuses to promote: SQLSTATE 23514 their_rule"
        assert f"{says}, due in 2h" in cli("jobs").ok().out
        [shown] = [line for line in cli("job", job_id).ok().lines if line.startswith(says)]
        assert re.fullmatch(r"; first \d+s ago, tries: 1, again in (2h|1h ?59m)", shown.removeprefix(says))
        for found in (cli("jobs", "--json").ok().json[0], cli("job", job_id, "--json").ok().json):
            [mark] = found["refused"]
            assert (mark["job_id"], mark["sqlstate"], mark["tries"]) == (str(job_id), "23514", 1)

    def test_jobs_that_hang_are_listed_by_their_age(self, cli: Cli, sql: Sql) -> None:
        hung = insert_job(sql, "processing", claimed_at=ago(7200), progress_at=ago(1000))
        long = insert_job(sql, "processing", claimed_at=ago(10_800), progress_at=NOW)
        silent = insert_job(sql, "processing", last_activity_at=ago(120), claimed_at=ago(150))
        insert_job(sql, "processing")
        [line] = cli("jobs", "--no-progress-for", 600).ok().lines[1:]
        assert line.startswith(str(hung))
        assert "running for 2h, heartbeat 0s ago, progress 17m ago" in as_if_at_once(line)
        running = cli("jobs", "--running-for", 100, "--json").ok().json
        assert [job["id"] for job in running] == [str(long), str(hung), str(silent)]
        assert running[1]["progress_at"] < running[0]["progress_at"]
        both = cli("jobs", "--running-for", 100, "--stale-for", 60, "--json").ok().json
        assert [job["id"] for job in both] == [str(silent)]

    @pytest.mark.parametrize("option", ["--stale-for", "--running-for", "--no-progress-for"])
    def test_only_running_jobs_have_an_age(self, option: str, cli: Cli) -> None:
        line = cli("jobs", option, 60, "--status", "queued").refused(2)
        assert line == f"--status queued: only jobs that are processing have a {option}"
        line = cli("jobs", option, "nan").refused(2)
        assert line == f"{option} nan must be a number of seconds, 0 or more"

    def test_the_limit_is_told(self, cli: Cli, sql: Sql) -> None:
        for _ in range(3):
            insert_job(sql)
        found = cli("jobs", "--limit", 2)
        assert (found.code, len(found.lines)) == (0, 3)
        first = cli("jobs", "--limit", 2, "--json").ok().json
        assert len(first) == 2
        last = first[-1]["id"]
        assert found.errors == [f"there may be more: jsworker jobs --limit 2 --after {last}"]
        assert len(cli("jobs", "--limit", 2, "--after", last, "--json").ok().json) == 1
        assert len(cli("jobs", "--status", "queued", "--limit", 2, "--after", last).ok().lines) == 2

    def test_a_search_that_takes_too_long_says_where_it_ended(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seldom = insert_job(sql, "completed", priority=0)
        jobs = [insert_job(sql, "completed") for _ in range(3)]
        monkeypatch.setattr(listing, "WINDOW", 2)
        found = cli("jobs", "--priority", "high", "--limit", 1, "--json").ok().json
        assert [job["id"] for job in found] == [str(seldom)]
        monkeypatch.setattr("jsworker.cli.jobs._SEARCH_SECONDS", 0.0)
        found = cli("jobs", "--priority", "high", "--limit", 2, "--json")
        assert (found.code, found.json) == (0, [])
        assert found.errors[0].endswith(f" --after {jobs[1]}")

    def test_the_place_of_a_job_that_is_gone_is_not_known(self, cli: Cli, sql: Sql) -> None:
        insert_job(sql)
        gone = uuid4()
        line = cli("jobs", "--status", "queued", "--after", gone).refused(1)
        assert line == f"no place in the listing of queued jobs is known of job {gone}"

    @pytest.mark.usefixtures("sql")
    def test_no_jobs_are_an_empty_list(self, cli: Cli) -> None:
        assert cli("jobs", "--json").ok().json == []

    def test_a_kind_that_cannot_be_is_refused(self, cli: Cli) -> None:
        assert cli("jobs", "--kind", "No Kind").refused(2).startswith("kind 'No Kind' must match")

    def test_a_terminal_of_100_columns_shows_whole_ids(
        self, sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str]
    ) -> None:
        worker_id = "a-long-host-name-of-a-pod-0-12345-deadbeef"
        job_id = insert_job(sql, "processing", kind="a-kind-with-quite-a-long-name", worker_id=worker_id)
        terminal = Terminal("jobs", cwd=tmp_path, environment=os.environ | cli_environment)
        assert terminal.wait() == 0
        assert max(map(len, terminal.plain_text.splitlines())) <= 100
        first, second = terminal.plain_text.splitlines()
        told = f"{job_id}  a-kind-with-quite-a-long-name  processing  try 1/3, "
        assert re.fullmatch(rf"{re.escape(told)}\d+s ago", first)
        assert second.startswith(f"    {worker_id}, running for ")

    @pytest.mark.parametrize("no_color", ["", "1"])
    def test_terminals_get_colours_unless_they_want_none(
        self, no_color: str, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        insert_job(sql, "failed")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("NO_COLOR", no_color)
        screen = Keyboard()
        monkeypatch.setattr("sys.stdout", screen)
        assert cli("jobs").code == 0
        assert ("\x1b[31mfailed" in screen.getvalue()) is not bool(no_color)


class TestJob:
    def test_of_a_long_timeline_the_last_entries_are_shown(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", fencing_token=1200)
        sql.execute(
            "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)"
            " SELECT %s, 'snoozed', 'alpha-1-aaaa', n, jsonb_build_object('reason', 'no answer ' || n)"
            " FROM generate_series(1, 1200) AS n",
            [job_id],
        )
        found = cli("job", job_id)
        assert found.err == "the timeline may have earlier entries: these are the last 1,000\n"
        runs = [line for line in found.lines if line.startswith("run ")]
        assert runs[0] == "run 201 by alpha-1-aaaa: put off: no answer 201"
        assert (len(runs), runs[-1]) == (1000, "run 1200 by alpha-1-aaaa: put off: no answer 1200")
        timeline = cli("job", job_id, "--json").json["timeline"]
        assert [timeline[0]["fencing_token"], timeline[-1]["fencing_token"]] == [201, 1200]

    def test_a_job_is_shown_with_payload_result_and_timeline(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(
            sql,
            "completed",
            payload='{"n": 4, "text": "\\u001b[2J"}',
            result='{"twice": 8}',
            stale_after=seconds(300),
            last_error="ValueError: no\n  at once\x07",
        )
        sql.execute(
            """
            INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)
            VALUES (%s, 'error', 'alpha-1-aaaa', 1, E'ValueError: no\nTraceback',
              '{"errors": 1, "\\u001b[2J": 0}')
            """,
            [job_id],
        )
        found = cli("job", job_id, "--all").ok()
        words = " ".join(found.out.split())
        for expected in (
            f"id {job_id}",
            'payload { "n": 4, "text": "\\u001b[2J" }',
            'result { "twice": 8 }',
            "stale_after 300 s",
            "cleared false",
            "last_error ValueError: no at once\\x07",
            "1 attempt failed: ValueError: no",
        ):
            assert expected in words
        assert "traceparent" not in words

        as_json = cli("job", job_id, "--json").ok().json
        assert (as_json["payload"]["n"], as_json["result"], as_json["stale_after"]) == (
            4,
            {"twice": 8},
            300.0,
        )
        assert as_json["traceparent"] is None
        [event] = as_json["timeline"]
        assert event.pop("at").endswith("Z")
        assert event == {
            "event": "error",
            "worker_id": "alpha-1-aaaa",
            "fencing_token": 1,
            "error": "ValueError: no\nTraceback",
            "detail": {"errors": 1, "\x1b[2J": 0},
        }

    def test_it_answers_why_a_job_ran_twice(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, "completed", fencing_token=6)
        events = [
            ("skipped", "gamma-3", 1, None, {"owner": "alpha-1", "token": 1}),
            (
                "reset",
                "beta-2",
                1,
                None,
                {"cause": "crashed", "owner": "alpha-1", "counted": True, "stalls": 1},
            ),
            ("claimed", "beta-2", 2, None, {"attempt": 2}),
            ("rejected", "alpha-1", 1, None, {"write": "complete"}),
            ("error", "beta-2", 2, "ValueError: no\nTraceback", {"errors": 1}),
            ("claimed", "beta-2", 3, None, {"attempt": 3}),
            ("fenced", "beta-2", 3, None, {"seconds_without_heartbeat": 1.4}),
            ("released", "beta-2", 3, None, {"reason": "it stopped the run"}),
            ("claimed", "alpha-4", 4, None, {"attempt": 3}),
            ("reset", None, 4, None, {"cause": "operator", "owner": "alpha-4", "counted": False}),
            ("claimed", "alpha-4", 5, None, {"attempt": 3}),
            (
                "reset",
                "supervisor-5",
                5,
                None,
                {
                    "cause": "dead",
                    "owner": "alpha-4",
                    "counted": False,
                    "reason": "its process was ended, because job 4711 went on",
                },
            ),
            ("claimed", "beta-2", 6, None, {"attempt": 3}),
            ("error_after_completion", "beta-2", 6, "ValueError: late\nTraceback", None),
        ]
        for event, worker, token, error, detail in events:
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                [job_id, event, worker, token, error, json.dumps(detail)],
            )
        shown = cli("job", job_id).ok().lines
        lines = [line for line in shown if line.startswith("run ")]
        silent = "its heartbeats stopped and no process answered for it on NATS"
        fenced = "it stopped itself, because its heartbeats were not answered"
        notes = "gamma-3 skipped a message about it; its late complete was refused"
        ended = "its process was proven to have ended (its process was ended, because job 4711 went on)"
        by_hand = "taken back by an operator, because an operator said so; not counted as a stall"
        assert lines == [
            f"run 1 by alpha-1: taken back by beta-2, because {silent}; stall 1; {notes}",
            "run 2 by beta-2: attempt failed: ValueError: no",
            f"run 3 by beta-2: handed back: it stopped the run; {fenced}",
            f"run 4 by alpha-4: {by_hand}",
            f"run 5 by alpha-4: taken back by supervisor-5, because {ended}; not counted as a stall",
            "run 6 by beta-2: completed; it raised afterwards: ValueError: late",
        ]
        entries = [" ".join(line.split()).split(" ", 2)[2] for line in shown if re.match(r"\d{4}-", line)]
        assert entries == [
            "1 gamma-3 skipped a message about it: alpha-1 has it",
            f"1 taken back by beta-2, because {silent}; stall 1",
            "2 claimed by beta-2 for attempt 2",
            "1 a late complete by alpha-1 was refused",
            "2 attempt failed: ValueError: no",
            "3 claimed by beta-2 for attempt 3",
            "3 beta-2 stopped it: its heartbeats were not answered for 1.4 s",
            "3 handed back: it stopped the run",
            "4 claimed by alpha-4 for attempt 3",
            f"4 {by_hand}",
            "5 claimed by alpha-4 for attempt 3",
            f"5 taken back by supervisor-5, because {ended}; not counted as a stall",
            "6 claimed by beta-2 for attempt 3",
            "6 raised after its transaction had completed the job: ValueError: late",
        ]

    def test_a_claim_tells_a_job_that_was_handed_back_from_one_that_was_taken_back(
        self, cli: Cli, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "completed", fencing_token=3)
        stopped, gone = "the worker was stopped", "worker beta-2 has ended"
        for event, worker, token, detail in [
            ("released", "alpha-1", 1, {"reason": stopped}),
            ("claimed", "beta-2", 2, {"attempt": 1, "cleared": True, "clear_reason": stopped}),
            ("reset", "alpha-1", 2, {"cause": "dead", "owner": "beta-2", "counted": True, "stalls": 1}),
            ("claimed", "alpha-1", 3, {"attempt": 2, "cleared": True, "clear_reason": gone}),
            ("claimed", "alpha-1", None, {"attempt": 2, "clear_reason": gone}),
        ]:
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)"
                " VALUES (%s, %s, %s, %s, %s)",
                [job_id, event, worker, token, json.dumps(detail)],
            )
        shown = cli("job", job_id).ok().lines
        entries = [" ".join(line.split()).split(" ", 2)[2] for line in shown if re.match(r"\d{4}-", line)]
        assert entries == [
            "1 handed back: the worker was stopped",
            "2 claimed by beta-2 for attempt 1, after it was handed back: the worker was stopped",
            "2 taken back by alpha-1, because its process was proven to have ended; stall 1",
            "3 claimed by alpha-1 for attempt 2, after it was taken back: worker beta-2 has ended",
            "claimed by alpha-1 for attempt 2, after it was taken back: worker beta-2 has ended",
        ]

    def test_the_end_of_an_isolated_process_and_of_a_superseded_run_are_told(
        self, cli: Cli, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "cancelled", fencing_token=2)
        died = "the process in which the job ran was killed by SIGKILL"
        for event, worker, token, error, detail in [
            ("error", "alpha-1", 1, died, {"errors": 0, "stalls": 1}),
            ("claimed", "beta-2", 2, None, {"attempt": 2}),
            ("cancelled", "beta-2", 2, "ValueError: no\nTraceback", {"errors": 0, "reason": "superseded"}),
        ]:
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                [job_id, event, worker, token, error, json.dumps(detail)],
            )
        shown = cli("job", job_id).ok().lines
        waited = "another job of its unique key waited already when it came back to the queue"
        assert [line for line in shown if line.startswith("run ")] == [
            f"run 1 by alpha-1: {died}; stall 1",
            f"run 2 by beta-2: cancelled: {waited}; its error: ValueError: no",
        ]

    def test_a_long_value_is_cut(self, cli: Cli, sql: Sql) -> None:
        many, long = insert_job(sql, payload=json.dumps([*range(1_000)])), insert_job(sql, payload='"x"')
        sql.execute("UPDATE jsworker.jobs SET payload = to_jsonb(repeat('x', 200000)) WHERE id = %s", [long])
        shown = [line.split()[-1] for line in cli("job", many).ok().lines]
        assert (shown.index("198,") + 1, "199," in shown) == (shown.index("all"), False)
        assert cli("job", many, "--all").ok().out.count("... `--json` shows all") == 1
        shown_long = cli("job", long).ok().out
        assert (shown_long.count("x") < 110_000, "... `--json` shows all" in shown_long) == (True, True)
        assert cli("job", many, "--json").ok().json["payload"] == [*range(1_000)]

    def test_an_entry_of_a_newer_version_is_shown_as_it_is(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql)
        sql.execute(
            "INSERT INTO jsworker.job_events (job_id, event, detail) VALUES (%s, 'whispered', %s)",
            [job_id, json.dumps({"by\x1b": "limit"})],
        )
        assert cli("job", job_id).ok().lines[-1].rstrip().split(maxsplit=2)[2] == r"whispered, by\x1b=limit"

    def test_what_held_it_and_when_it_was_woken_is_told(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql)
        for event, detail in (
            ("held", {"held_by": "limit", "key": "tenant-7"}),
            ("woken", {"held_by": "needs"}),
        ):
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, detail) VALUES (%s, %s, %s)",
                [job_id, event, json.dumps(detail)],
            )
        told = [line.rstrip().split(maxsplit=2)[2] for line in cli("job", job_id).ok().lines[-2:]]
        assert told == ["held by limit tenant-7", "woken: it was held by needs"]

    @pytest.mark.parametrize(
        ("status", "columns", "says"),
        [
            (
                "scheduled",
                {"run_at": ago(-7200.5), "attempts": 1, "errors": 1},
                r"runs again in 2h, at \d{4}-.*",
            ),
            (
                "queued",
                {"cleared": True, "clear_reason": "node drained"},
                "waits for a free worker since 0s; returned: node drained",
            ),
            (
                "queued",
                {"needs_publish": True, "publish_after": ago(1)},
                "its message waits to be published since 0s",
            ),
            ("processing", {"cancel_requested": True, "claimed_at": ago(90)}, "runs since 2m, asked to stop"),
            ("completed", {"completed_by": "alpha-1-aaaa"}, "by alpha-1-aaaa"),
            ("failed", {}, "no attempt is left; `jsworker retry` puts it back into the queue"),
            ("cancelled", {}, "on request; `jsworker retry` puts it back into the queue"),
        ],
    )
    def test_it_begins_with_how_the_job_stands_and_why(
        self, cli: Cli, sql: Sql, status: str, columns: dict[str, Any], says: str
    ) -> None:
        insert_worker(sql, "alpha-1-aaaa", kinds="{count-lines}")
        job_id = insert_job(sql, status, **columns)
        lines = cli("job", job_id).ok().lines
        assert lines[0].split() == ["job", "count-lines", str(job_id)]
        name, value = lines[1].split(maxsplit=1)
        assert name == "status"
        assert re.fullmatch(f"{status}: {says}", as_if_at_once(value.rstrip())), value
        assert not any(line.startswith(("fencing_token", "dispatch", "stream_seq")) for line in lines)

    def test_queued_jobs_of_more_kinds_than_are_listed(self, cli: Cli, sql: Sql) -> None:
        for number in range(listing.MOST_KINDS):
            insert_job(sql, "queued", kind=f"kind-{number:03d}")
        listed = ("jobs", "--status", "queued", "--limit", 500)
        cli(*listed).ok()
        insert_job(sql, "queued", kind="last", priority=0)
        first = (
            "only the first 100 kinds are listed; add --kind KIND for another: `jsworker status --limit 1000`"
        )
        found = cli(*listed, "--json")
        assert (found.code, found.err, len(found.json)) == (0, f"{first} names all\n", listing.MOST_KINDS)
        assert cli(*listed).err == f"{first} names all\n"
        for chosen in (("--kind", "last"), ("--priority", "high")):
            assert "last" in cli(*listed, *chosen).ok().out

    def test_a_queued_job_names_what_keeps_workers_from_it(self, cli: Cli, sql: Sql) -> None:
        def status() -> str:
            return as_if_at_once(" ".join(cli("job", job_id).ok().lines[1].split()))

        def listed() -> str:
            line = as_if_at_once(" ".join(cli("jobs", "--status", "queued").ok().lines[1].split()))
            return line.removeprefix(f"{job_id} count-lines queued 0/- 0s").strip()

        job_id = insert_job(sql, "queued")
        insert_worker(sql, "alpha-2-aaaa", kinds="{count}")
        assert status() == "status queued: waits since 0s; no live worker serves its kind"
        assert listed() == "no live worker serves its kind"
        insert_worker(sql, "alpha-1-aaaa", kinds="{count-lines}", state="drained")
        insert_worker(sql, "alpha-4-aaaa", kinds="{count-lines}", state="draining")
        drained = "every live worker for its kind is drained or ending"
        assert status() == f"status queued: waits since 0s; {drained}"
        assert listed() == drained
        insert_worker(sql, "alpha-3-aaaa", kinds="{count,count-lines}")
        assert status() == "status queued: waits for a free worker since 0s"
        assert listed() == ""
        sql.execute("INSERT INTO jsworker.limits (kind, key, paused_at) VALUES ('count-lines', '', now())")
        paused = r"waits since 0s; its kind is paused since 20[-\d]+ [:\d]+: `jsworker resume count-lines`"
        assert re.fullmatch(f"status queued: {paused}", status())
        assert listed() == "its kind is paused"
        sql.execute("UPDATE jsworker.limits SET paused_until = now() - interval '1 s'")
        assert status() == "status queued: waits for a free worker since 0s"
        sql.execute("UPDATE jsworker.jobs SET needs_publish = true, publish_after = now()")
        sql.execute("UPDATE jsworker.workers SET last_seen_at = now() - interval '1 hour'")
        unserved = "its message waits to be published since 0s; no live worker serves its kind"
        assert status() == f"status queued: {unserved}"

    def test_a_completed_job_names_who_ran_it(self, cli: Cli, sql: Sql) -> None:
        times = {"claimed_at": ago(90), "finished_at": ago(87.5)}
        job_id = insert_job(sql, "completed", completed_by="alpha-1-aaaa", fencing_token=1, **times)
        assert "run 1 by alpha-1-aaaa: completed after 2.5 s" in cli("job", job_id).ok().lines

    def test_a_traceback_begins_at_the_users_code(self, cli: Cli, sql: Sql) -> None:
        code = "jsworker/worker/pipeline/invocation.py"
        ours = f'  File "/v/site-packages/{code}", line 35, in _process\n    value = 1\n'
        users = '  File "/app/jobs.py", line 3, in process\n    raise ValueError("no\\x07")\n'
        header = "Traceback (most recent call last):\n"
        error = f"ValueError: no\n{header}{ours}{users}ValueError: no\x07"
        job_id = insert_job(sql, "failed", last_error=error)
        assert "ValueError: no at /app/jobs.py, line 3, in process" in cli("job", job_id).ok().out
        shown = error.replace("\x07", r"\x07")
        assert cli("job", job_id, "--full-traceback").ok().out == f"{shown}\n"
        assert cli("job", job_id, "--traceback").ok().out == f"{shown.replace(ours, '')}\n"
        assert cli("job", insert_job(sql), "--traceback").ok().lines == ["there was no error"]

    def test_the_last_eight_digits_name_a_job(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "WINDOW", 2)
        ids = [insert_job(sql) for _ in range(5)]
        for job_id in ids:
            found = cli("job", str(job_id)[-8:].upper(), "--json").ok().json
            assert found["id"] == str(job_id)
        unknown = "0" * 8
        assert cli("job", unknown).refused(1).endswith(f"ends in {unknown}; name it by its whole id")
        assert (
            cli("job", "4711").refused(2)
            == "'4711' is no id of a job: a UUID, or at least its last eight digits"
        )
        twin = UUID(f"{str(uuid4())[:-8]}{str(ids[0])[-8:]}")
        sql.execute("UPDATE jsworker.jobs SET id = %s WHERE id = %s", [twin, ids[1]])
        monkeypatch.setattr(listing, "WINDOW", 10)
        assert "several jobs have ids that end in" in cli("job", str(ids[0])[-8:]).refused(1)

    def test_a_job_that_nothing_happened_to_has_no_timeline(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql)
        assert "EVENT" not in cli("job", job_id).ok().out
        assert cli("job", job_id, "--json").ok().json["timeline"] == []

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_an_unknown_job_is_1(self, options: list[str], cli: Cli) -> None:
        job_id = uuid4()
        assert cli("job", job_id, *options).refused(1) == f"no job has id {job_id}"


class TestWorkers:
    def test_workers_are_listed_with_what_they_run(self, cli: Cli, sql: Sql) -> None:
        insert_worker(sql, "alpha-1-aaaa")
        insert_job(sql, "processing", worker_id="alpha-1-aaaa")
        found = cli("workers").ok()
        assert found.lines[0].split() == [
            *("ID", "STATE", "BUSY", "MEM", "LAG", "SEEN", "UP", "PARENT", "VERSION", "KINDS"),
        ]
        assert found.lines[1].split() == [
            *("alpha-1-aaaa", "running", "1/10", "0s", "0s", "0.1.0", "double,", "boom"),
        ]
        [worker] = cli("workers", "--json").ok().json
        assert (worker["id"], worker["processing"], worker["kinds"]) == (
            "alpha-1-aaaa",
            1,
            ["double", "boom"],
        )

    def test_memory_lag_and_supervisor_are_shown(self, cli: Cli, sql: Sql) -> None:
        insert_worker(sql, "alpha-1-aaaa")
        sql.execute(
            "UPDATE jsworker.workers"
            " SET memory_bytes = 91226112, loop_lag_seconds = 0.25, supervisor_pid = 17"
        )
        assert cli("workers").ok().lines[1].split()[3:8] == ["87M", "250ms", "0s", "0s", "17"]

    def test_a_worker_is_drained_and_undrained(self, cli: Cli, sql: Sql) -> None:
        insert_worker(sql, "alpha-1-aaaa")
        assert cli("drain", "alpha-1-aaaa").ok().lines == ["worker alpha-1-aaaa is to be drained"]
        assert "alpha-1-aaaa to be drained 0/10" in " ".join(cli("workers").ok().lines[1].split())
        sql.execute("UPDATE jsworker.workers SET state = 'drained'")
        assert cli("workers").ok().lines[1].split()[1] == "drained"
        found = cli("status").ok()
        assert "workers: 1 alive, 1 drained; 0 of 0 job slots in use" in found.lines
        [kind, *_] = cli("status", "--json").ok().json["kinds"]
        assert kind["workers"] == 0
        assert cli("undrain", "alpha-1-aaaa").ok().lines == ["worker alpha-1-aaaa claims jobs again"]
        assert cli("undrain", "alpha-1-aaaa").refused(1) == "worker alpha-1-aaaa is not drained"
        assert cli("drain", "alpha").refused(1) == "no worker has id alpha"

    def test_more_jobs_than_slots_were_claimed_ahead(self, cli: Cli, sql: Sql) -> None:
        insert_worker(sql, "alpha-1-aaaa")
        for _ in range(12):
            insert_job(sql, "processing", worker_id="alpha-1-aaaa")
        assert cli("workers").ok().lines[1].split()[2:4] == ["10/10", "+2"]

    @pytest.mark.parametrize(("state", "shown"), [("running", "silent"), ("stopped", "stopped")])
    def test_who_has_not_been_seen_for_four_heartbeats_is_silent(
        self, cli: Cli, sql: Sql, state: str, shown: str
    ) -> None:
        insert_worker(sql, "alpha-1-aaaa")
        sql.execute(SQL("UPDATE jsworker.workers SET state = {}, last_seen_at = {}").format(state, ago(25)))
        assert cli("workers").ok().lines[1].split()[1] == shown
        [worker] = cli("workers", "--json").ok().json
        assert (worker["state"], worker["alive"]) == (state, False)

    def test_the_limit_is_told(self, cli: Cli, sql: Sql) -> None:
        for name in ("a", "b"):
            insert_worker(sql, name)
        found = cli("workers", "--limit", 1)
        assert (len(found.lines), found.errors) == (
            2,
            ["there may be more: jsworker workers --limit 1 --after b"],
        )


class TestSteps:
    def test_steps_sleeps_and_snoozes_are_shown(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", fencing_token=2, run_at=ago(-3600), snoozes=1)
        sql.execute(
            "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token, at, sleeps_until) VALUES"
            " (%(id)s, 'charge', %(result)s, 1, now() - interval '3 min', NULL),"
            " (%(id)s, 'nothing', NULL, 1, now() - interval '2 min', NULL),"
            " (%(id)s, 'cool-off', NULL, 2, now() - interval '1 min', now() + interval '1 hour')",
            {"id": job_id, "result": json.dumps({"paid": "5\x1b[2J" + "x" * 300})},
        )
        for event, token, detail in (
            ("step", 1, {"step": "charge"}),
            ("snoozed", 1, {"reason": "the rates are not there yet", "snoozes": 1}),
            ("claimed", 2, {"attempt": 1}),
            ("sleep", 2, {"step": "cool-off", "until": "2026-11-24T12:00:00+00:00"}),
            ("snoozed", 2, {"reason": "sleeps: cool-off", "snoozes": 1}),
        ):
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)"
                " VALUES (%s, %s, 'alpha-1', %s, %s)",
                [job_id, event, token, json.dumps(detail)],
            )
        shown = [" ".join(line.split()) for line in cli("job", job_id).ok().lines]
        assert "run 1 by alpha-1: put off: the rates are not there yet" in shown
        assert "run 2 by alpha-1: put off: sleeps: cool-off" in shown
        head = shown.index("STEP RUN AT RESULT")
        assert re.fullmatch(r'charge 1 \S+ \S+ \{"paid": "5\\u001b\[2Jx+.*', shown[head + 1])
        assert any(re.fullmatch(r"nothing 1 \S+ \S+ null", line) for line in shown)
        assert any(re.fullmatch(r"cool-off 2 \S+ \S+ sleeps until \S+ \S+", line) for line in shown)
        assert any(line.endswith("1 step charge was done") for line in shown)
        assert any(
            re.search(r"2 sleep cool-off began, until 2026-11-\d\d \d\d:\d\d:00$", line) for line in shown
        )
        steps = cli("job", job_id, "--json").ok().json["steps"]
        assert [(step["name"], step["fencing_token"]) for step in steps] == [
            ("charge", 1),
            ("nothing", 1),
            ("cool-off", 2),
        ]
        assert steps[0]["result"] == {"paid": "5\x1b[2J" + "x" * 300}
        assert steps[2]["sleeps_until"].endswith("Z")

    def test_a_job_that_was_snoozed_too_often_says_so(self, cli: Cli, sql: Sql) -> None:
        job_id = insert_job(sql, "failed", failure_reason="snoozes", last_error="snoozed more often than")
        lines = cli("job", job_id).ok().lines
        assert any("failed: it was snoozed too often; `jsworker retry`" in line for line in lines)
