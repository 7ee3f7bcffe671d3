"""``retry``, ``cancel`` and ``clear``: by id, by filter, after a question, and what they refuse."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.ownership.rows import NOW, STATES, Sql, ago, change_job, insert_job, read_events, read_job

from .commands import Cli, Keyboard, Terminal

FAILED_JOBS = """
INSERT INTO jsworker.jobs
  (id, kind, payload, status, failure_reason, fencing_token, attempts, errors, finished_at, dispatch)
SELECT uuidv7(), 'double', '{}', 'failed', 'attempts', 1, 1, 1, clock_timestamp(), 1
FROM generate_series(1, %s)
RETURNING id
"""


def status(sql: Sql, job_id: object) -> str:
    return str(
        sql.execute("SELECT status FROM jsworker.jobs WHERE id = %s", [job_id]).fetchall()[0]["status"]
    )


class TestRetry:
    def test_failed_jobs_are_queued_again(self, cli: Cli, sql: Sql) -> None:
        first, second = insert_job(sql, "failed"), insert_job(sql, "failed")
        found = cli("retry", first, second, first).ok()
        assert found.lines == [f"{first} queued", f"{second} queued"]
        row = read_job(sql, second)
        assert (row["status"], row["attempts"], row["needs_publish"]) == ("queued", 0, True)

    def test_what_is_not_failed_is_refused_and_the_others_are_done(self, cli: Cli, sql: Sql) -> None:
        completed, failed, unknown = insert_job(sql, "completed"), insert_job(sql, "failed"), uuid4()
        found = cli("retry", completed, failed, unknown, "--json")
        assert found.code == 1
        assert found.json == [
            {"id": str(completed), "outcome": "refused"},
            {"id": str(failed), "outcome": "queued"},
            {"id": str(unknown), "outcome": "refused"},
        ]
        assert found.errors == [
            f"job {completed} is completed; only a failed or cancelled job can be retried",
            f"job {unknown} does not exist",
        ]

    def test_a_filter_takes_only_failed_jobs(self, cli: Cli, sql: Sql) -> None:
        failed = insert_job(sql, "failed", kind="double")
        others = [insert_job(sql, "failed"), insert_job(sql, "cancelled", kind="double")]
        assert cli("retry", "--kind", "double", "--yes").ok().lines == [f"{failed} queued"]
        assert [status(sql, job_id) for job_id in others] == ["failed", "cancelled"]

    def test_cancelled_jobs_are_retried_only_where_that_is_said(self, cli: Cli, sql: Sql) -> None:
        cancelled, by_id = insert_job(sql, "cancelled", kind="double"), insert_job(sql, "cancelled")
        found = cli("retry", "--kind", "double", "--yes")
        assert found.err == "no job matches: kind double, status failed\n"
        found = cli("retry", "--kind", "double", "--status", "cancelled", "--yes")
        assert found.ok().lines == [f"{cancelled} queued"]
        assert cli("retry", by_id).ok().lines == [f"{by_id} queued"]
        line = cli("retry", "--status", "completed", "--yes").refused(2)
        assert line == "--status completed: retry acts only on jobs that are failed or cancelled"

    def test_a_filter_by_the_last_error(self, cli: Cli, sql: Sql) -> None:
        meant = insert_job(sql, "failed", last_error="OSError: Connection refused")
        others = [insert_job(sql, "failed", last_error="KeyError: 'x'"), insert_job(sql, "failed")]
        found = cli("retry", "--error", "connection REFUSED", "--yes").ok()
        assert found.lines == [f"{meant} queued"]
        assert [status(sql, job_id) for job_id in others] == ["failed", "failed"]
        assert cli("retry", "--error", " ", "--yes").refused(2) == (
            "--error ' ' must be a text of 1 to 1000 characters"
        )


class TestCancel:
    def test_waiting_jobs_are_cancelled_and_running_ones_asked(self, cli: Cli, sql: Sql) -> None:
        jobs = [insert_job(sql, state) for state in ("scheduled", "queued", "processing")]
        assert cli("cancel", *jobs, "--json").ok().json == [
            {"id": str(jobs[0]), "outcome": "cancelled"},
            {"id": str(jobs[1]), "outcome": "cancelled"},
            {"id": str(jobs[2]), "outcome": "cancel_requested"},
        ]
        assert read_job(sql, jobs[2])["cancel_requested"] is True

    def test_ended_and_unknown_jobs_are_refused(self, cli: Cli, sql: Sql) -> None:
        completed, unknown, queued = insert_job(sql, "completed"), uuid4(), insert_job(sql)
        found = cli("cancel", completed, unknown, queued)
        assert (found.code, found.lines) == (1, [f"{queued} cancelled"])
        assert found.errors == [
            f"job {completed} is completed already; nothing is left to cancel",
            f"no job has id {unknown}",
        ]

    def test_a_locked_one_is_named_and_the_others_are_cancelled(
        self, cli: Cli, sql: Sql, cli_environment: Mapping[str, str]
    ) -> None:
        jobs = [insert_job(sql, kind="double") for _ in range(3)]
        with psycopg.connect(cli_environment["JSWORKER_DATABASE_URL"]) as other:
            other.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [jobs[1]])
            found = cli("cancel", "--status", "queued", "--yes")
        assert found.code == 1
        assert set(found.lines) == {f"{jobs[0]} cancelled", f"{jobs[2]} cancelled"}
        assert found.errors == [
            f"job {jobs[1]} cannot be cancelled: locked by another transaction: try again"
        ]

    def test_more_jobs_than_fit_one_statement(self, cli: Cli, sql: Sql) -> None:
        for _ in range(501):
            insert_job(sql, kind="double")
        kept = insert_job(sql, kind="other")
        assert len(cli("cancel", "--status", "queued", "--kind", "double", "--yes").ok().lines) == 501
        assert status(sql, kept) == "queued"

    def test_a_status_without_anything_to_cancel_is_wrong_usage(self, cli: Cli) -> None:
        line = cli("cancel", "--status", "failed", "--yes").refused(2)
        assert line == "--status failed: cancel acts only on jobs that are scheduled or queued or processing"


class TestClear:
    def test_running_jobs_are_taken_back_with_the_reason(self, cli: Cli, sql: Sql) -> None:
        running, queued, unknown = insert_job(sql, "processing"), insert_job(sql), uuid4()
        found = cli("clear", running, queued, unknown, "--reason", "node lost", "--json")
        assert (found.code, [each["outcome"] for each in found.json]) == (1, ["queued", "refused", "refused"])
        assert found.errors == [
            f"job {queued} is queued; only a running job can be cleared",
            f"no job has id {unknown}",
        ]
        row = read_job(sql, running)
        assert (row["status"], row["attempts"], row["clear_reason"]) == ("queued", 0, "node lost")
        assert [event["detail"]["cause"] for event in read_events(sql, running)] == ["operator"]

    def test_a_job_that_was_asked_to_stop_is_cancelled(self, cli: Cli, sql: Sql) -> None:
        running = insert_job(sql, "processing", cancel_requested=True)
        assert cli("clear", running, "--reason", "x").code == 0
        assert status(sql, running) == "cancelled"

    def test_only_jobs_that_have_been_silent(self, cli: Cli, sql: Sql) -> None:
        silent = insert_job(sql, "processing", last_activity_at=ago(100))
        lively = insert_job(sql, "processing")
        found = cli("clear", "--stale-for", 60, "--reason", "silent", "--yes").ok()
        assert found.lines == [f"{silent} queued"]
        assert status(sql, lively) == "processing"

    @pytest.mark.parametrize("option", ["--no-progress-for", "--running-for"])
    def test_jobs_that_hang_while_their_worker_lives(self, option: str, cli: Cli, sql: Sql) -> None:
        hung = insert_job(sql, "processing", claimed_at=ago(1000))
        working = insert_job(
            sql, "processing", claimed_at=ago(1 if "run" in option else 1000), progress_at=NOW
        )
        found = cli("clear", "--stale-for", 600, "--reason", "hangs", "--yes")
        assert (found.out, found.err) == ("", "no job matches: status processing, stale for 600.0\n")
        found = cli("clear", option, 600, "--reason", "hangs", "--yes").ok()
        assert found.lines == [f"{hung} queued"]
        assert status(sql, working) == "processing"

    def test_a_row_that_is_being_written_is_refused(
        self, cli: Cli, sql: Sql, cli_environment: Mapping[str, str]
    ) -> None:
        running = insert_job(sql, "processing")
        with psycopg.connect(cli_environment["JSWORKER_DATABASE_URL"]) as owner:
            owner.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [running])
            line = cli("clear", running, "--reason", "x").refused(1)
        assert line == f"job {running} cannot be cleared: locked by another transaction: try again"

    @pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 1001])
    def test_the_reason_is_a_line_of_text(self, reason: str, cli: Cli) -> None:
        line = cli("clear", uuid4(), "--reason", reason).refused(2)
        assert line == "--reason must be 1 to 1000 printable characters"

    @pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
    @pytest.mark.parametrize("option", ["--stale-for", "--running-for", "--no-progress-for"])
    def test_a_time_that_makes_no_sense_is_refused(self, seconds: str, option: str, cli: Cli) -> None:
        line = cli("clear", option, seconds, "--reason", "x", "--yes").refused(2)
        assert line.startswith(option)
        assert line.endswith("must be a number of seconds, 0 or more")


COMMANDS = pytest.mark.parametrize(
    "command", [("retry",), ("cancel",), ("clear", "--reason", "x")], ids=lambda command: command[0]
)


def agree_after(change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the question of a command be answered with yes, once others have made a change."""

    def answer(_: int = -1) -> str:
        change()
        return "y\n"

    keyboard = Keyboard()
    monkeypatch.setattr(keyboard, "readline", answer)
    monkeypatch.setattr("sys.stdin", keyboard)


class TestChoice:
    @COMMANDS
    def test_ids_or_a_filter_are_needed(self, command: tuple[str, ...], cli: Cli) -> None:
        assert cli(*command).refused(2).startswith(f"{command[0]} needs ids, or --status/--kind")

    @COMMANDS
    def test_ids_and_a_filter_exclude_each_other(self, command: tuple[str, ...], cli: Cli) -> None:
        assert cli(*command, uuid4(), "--kind", "double").refused(2).endswith(", not both")

    @COMMANDS
    def test_a_filter_without_a_terminal_needs_yes(self, command: tuple[str, ...], cli: Cli) -> None:
        assert cli(*command, "--kind", "double").refused(2).endswith("and here is no terminal: add --yes")

    @COMMANDS
    def test_a_kind_that_cannot_be_is_refused(self, command: tuple[str, ...], cli: Cli) -> None:
        assert cli(*command, "--kind", "No Kind", "--yes").refused(2).startswith("kind 'No Kind' must match")

    @COMMANDS
    @pytest.mark.usefixtures("sql")
    def test_a_filter_that_finds_nothing_is_no_error(self, command: tuple[str, ...], cli: Cli) -> None:
        found = cli(*command, "--kind", "double", "--yes", "--json")
        assert (found.code, found.json) == (0, [])
        assert found.err.startswith("no job matches: kind double, status ")

    @pytest.mark.parametrize("answer", ["y\n", "YES\n"])
    def test_yes_is_yes(self, answer: str, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs = [insert_job(sql), insert_job(sql)]
        monkeypatch.setattr("sys.stdin", Keyboard(answer))
        found = cli("cancel", "--status", "queued", "--json")
        assert (found.code, found.err) == (0, "cancel 2 jobs (status queued)? [y/N] ")
        assert [each["id"] for each in found.json] == [str(job_id) for job_id in jobs]

    def test_very_many_are_not_all_looked_for_before_the_question(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs = [insert_job(sql) for _ in range(3)]
        monkeypatch.setattr("jsworker.cli.control._MOST_ASKED_FOR", 2)
        monkeypatch.setattr("sys.stdin", Keyboard("y\n"))
        found = cli("cancel", "--status", "queued", "--json")
        assert (found.code, found.err) == (0, "cancel at least 3 jobs (status queued)? [y/N] ")
        assert [each["id"] for each in found.json] == [str(job_id) for job_id in jobs]

    @pytest.mark.parametrize(
        ("command", "state"),
        [
            (("clear", "--reason", "x"), "processing"),
            (("retry",), "failed"),
            (("cancel", "--status", "queued"), "queued"),
        ],
    )
    def test_of_very_many_those_that_others_changed_while_the_operator_thought_are_left_alone(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], state: str
    ) -> None:
        jobs = [insert_job(sql, state) for _ in range(2)]
        later = insert_job(sql, state)

        def change() -> None:
            moment = {"processing": "claimed_at", "failed": "finished_at", "queued": "created_at"}[state]
            change_job(sql, later, fencing_token=2, **{moment: NOW})

        monkeypatch.setattr("jsworker.cli.control._MOST_ASKED_FOR", 2)
        agree_after(change, monkeypatch)
        found = cli(*command, "--kind", "count-lines")
        assert {line.partition(" ")[0] for line in found.lines} == {str(job_id) for job_id in jobs}
        assert status(sql, later) == state

    @pytest.mark.parametrize("answer", ["\n", "no\n", "", "yesterday\n"])
    def test_everything_else_is_no(
        self, answer: str, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job_id = insert_job(sql, kind="double")
        monkeypatch.setattr("sys.stdin", Keyboard(answer))
        found = cli("cancel", "--kind", "double", "--status", "queued", "--json")
        assert (found.code, found.out) == (1, "")
        assert found.err == "cancel 1 job (kind double, status queued)? [y/N] Nothing was done.\n"
        assert status(sql, job_id) == "queued"

    def test_a_job_that_moved_on_while_the_operator_thought_is_refused(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job_id = insert_job(sql, "processing")

        def change() -> None:
            change_job(sql, job_id, fencing_token=2)

        agree_after(change, monkeypatch)
        found = cli("clear", "--kind", "count-lines", "--reason", "x")
        assert (found.code, found.out) == (1, "")
        assert found.errors[0].endswith(f"job {job_id} has been claimed anew since it was found")
        assert found.errors[1:] == ["1 job was left out: it had changed since it was found"]

    def test_a_job_that_gave_a_sign_of_life_while_the_operator_thought_is_left_alone(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lively, silent = (insert_job(sql, "processing", last_activity_at=ago(600)) for _ in range(2))

        def change() -> None:
            change_job(sql, lively, last_activity_at=NOW)

        agree_after(change, monkeypatch)
        found = cli("clear", "--stale-for", 300, "--reason", "x")
        assert (found.code, found.lines) == (1, [f"{silent} queued"])
        assert found.errors[-2].endswith(f"job {lively}: its worker gave a sign of life")
        assert found.errors[-1] == "1 job was left out: it had changed since it was found"
        assert status(sql, lively) == "processing"

    @pytest.mark.parametrize(
        ("verb", "left"),
        [
            ("clear", "it has progressed"),
            ("cancel", "it has progressed, or it has been claimed anew"),
        ],
    )
    def test_a_job_that_has_progressed_while_the_operator_thought_is_left_alone(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, verb: str, left: str
    ) -> None:
        working, hung = (insert_job(sql, "processing", claimed_at=ago(600)) for _ in range(2))
        insert_job(sql)

        def change() -> None:
            change_job(sql, working, progress_at=NOW)

        agree_after(change, monkeypatch)
        why = ["--reason", "x"] if verb == "clear" else []
        found = cli(verb, "--no-progress-for", 300, *why)
        assert (found.code, found.lines) == (1, [f"{hung} {'queued' if why else 'cancel_requested'}"])
        question, _, first = found.errors[0].partition("? [y/N] ")
        assert question == f"{verb} 2 jobs (status processing, no progress for 300.0)"
        assert first == f"job {working}: {left}"
        assert found.errors[-1] == "1 job was left out: it had changed since it was found"
        row = read_job(sql, working)
        assert (row["status"], row["cancel_requested"]) == ("processing", False)

    def test_jobs_of_another_status_by_then_are_not_cancelled(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claimed, ended, waiting = (insert_job(sql) for _ in range(3))

        def change() -> None:
            change_job(sql, claimed, **STATES["processing"], status="processing")
            change_job(sql, ended, status="cancelled", finished_at=NOW)

        agree_after(change, monkeypatch)
        found = cli("cancel", "--status", "queued")
        assert (found.code, found.lines) == (1, [f"{waiting} cancelled"])
        assert [error.rpartition("] ")[2] for error in found.errors] == [
            f"job {claimed} is processing by now",
            f"job {ended} is cancelled already; nothing is left to cancel",
            "2 jobs were left out: they had changed since they were found",
        ]
        assert (status(sql, claimed), read_job(sql, claimed)["cancel_requested"]) == ("processing", False)

    def test_failed_jobs_that_others_have_acted_on_by_then_are_not_retried(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cancelled, ran, failed = (insert_job(sql, "failed") for _ in range(3))

        def change() -> None:
            again = {**STATES["queued"], "dispatch": 2, "finished_at": None, "failure_reason": None}
            change_job(sql, cancelled, **again, status="queued")
            change_job(sql, cancelled, status="cancelled", finished_at=NOW)
            change_job(sql, ran, fencing_token=2)

        agree_after(change, monkeypatch)
        found = cli("retry", "--kind", "count-lines")
        assert (found.code, found.lines) == (1, [f"{failed} queued"])
        assert [error.rpartition("] ")[2] for error in found.errors] == [
            f"job {cancelled} is cancelled by now",
            f"job {ran} has run again since it was found",
            "2 jobs were left out: they had changed since they were found",
        ]
        assert [status(sql, each) for each in (cancelled, ran)] == ["cancelled", "failed"]

    def test_ctrl_c_at_the_question_ends_at_once(
        self, sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str]
    ) -> None:
        job_id = insert_job(sql)
        terminal = Terminal(
            "cancel", "--status", "queued", cwd=tmp_path, environment=os.environ | cli_environment
        )
        terminal.read_until(r"cancel 1 job \(status queued\)\? \[y/N\] ")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert status(sql, job_id) == "queued"


@pytest.mark.parametrize(("answer", "bar"), [("--yes", r"done .*600/\?"), ("y", "done .*600/600")])
def test_a_terminal_shows_a_bar_below_the_lines(
    sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str], answer: str, bar: str
) -> None:
    ids = [row["id"] for row in sql.execute(FAILED_JOBS, [600])]
    asked = [] if answer == "--yes" else ["retry 600 jobs"]
    options = ["--kind", "double", *([] if asked else [answer])]
    terminal = Terminal("retry", *options, cwd=tmp_path, environment=os.environ | cli_environment)
    for question in asked:
        terminal.read_until(question)
        terminal.type(f"{answer}\n")
    assert terminal.wait() == 0
    lines = re.split(r"\n|\r|\x1b\[[0-9;?]*[A-Za-ln-z]", terminal.plain_text)
    assert {f"{each} queued" for each in ids} <= set(lines)
    assert any(re.search(bar, line) for line in lines)
