import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from jsworker.cli.app import exit_code_of
from jsworker.core.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    InvalidJson,
    InvalidName,
    InvalidPayload,
    InvalidTarget,
    JobNotFound,
    MigrationMissing,
    ServersUnavailable,
    SettingsError,
    StreamRefused,
    StreamUnavailable,
    TransitionRefused,
)
from jsworker.core.exit_codes import WrongUsage
from tests.ownership.rows import Sql, insert_job

from .commands import COMMAND, PATIENT_COMMAND
from .test_dead_messages import insert_message


def raising(error: BaseException) -> Callable[[], Any]:
    def command() -> None:
        secret = "open sesame"  # noqa: F841 -- must not be shown
        raise error

    return command


@pytest.mark.parametrize("returned", [None, 0, 1])
def test_a_command_returns_its_code(returned: int | None) -> None:
    assert exit_code_of(lambda: returned) == (returned or 0)


@pytest.mark.parametrize(
    "error",
    [SettingsError, InvalidJson, InvalidName, InvalidPayload, InvalidTarget, WrongUsage],
)
def test_the_callers_mistakes_are_2(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(error("a mistake"))) == 2
    assert capsys.readouterr() == ("", "a mistake\n")


@pytest.mark.parametrize(
    "error",
    [
        *(DatabaseRefused, DatabaseUnavailable, JobNotFound, MigrationMissing, ServersUnavailable),
        *(StreamRefused, StreamUnavailable, TransitionRefused),
    ],
)
def test_what_failed_is_1(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(error("it failed"))) == 1
    assert capsys.readouterr() == ("", "it failed\n")


def test_an_error_is_one_line_unless_it_lists_faults(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code_of(raising(StreamRefused("first\n  second\n")))
    assert capsys.readouterr().err == "first second\n"
    exit_code_of(raising(SettingsError("first\nsecond")))
    assert capsys.readouterr().err == "first\nsecond\n"


def test_an_interrupted_command_is_130_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_an_unexpected_error_shows_its_traceback_without_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(LookupError("surprise"))) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("LookupError: surprise\n")
    assert "sesame" not in shown.replace('secret = "open sesame"', "")


@pytest.mark.parametrize("words", [1, 100_000])
def test_a_reader_that_has_gone_is_no_traceback(
    words: int, sql: Sql, cli_environment: Mapping[str, str]
) -> None:
    insert_job(sql, "failed", last_error="long " * words)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = _writing_to(gone, "jobs --json", cli_environment, "")  # a few words are written at the end
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        # More than the buffer holds, and less, which is written at the end; typer flushes what it writes.
        *(("jobs --json", ""), ("schedules list --json", "")),
        *(("jobs", "1"), ("--help", "1"), ("jobs --help", "1"), ("--version", "1")),
    ],
)
def test_a_full_disk_is_one_line(
    command: str, unbuffered: str, sql: Sql, cli_environment: Mapping[str, str]
) -> None:
    insert_job(sql, "failed", last_error="long " * 100_000)
    done = _onto_a_full_disk(command, cli_environment, unbuffered)
    assert (done.returncode, done.stderr) == (1, "standard output: No space left on device\n")


@pytest.mark.parametrize("options", ["", " --count 3", " --json", " --from lines", " --from lines --json"])
def test_ids_of_stored_jobs_are_not_lost_on_a_full_disk(
    options: str, sql: Sql, here: Path, cli_environment: Mapping[str, str]
) -> None:
    (here / "lines").write_text("{}\n{}\n")
    done = _onto_a_full_disk(f"enqueue tidy{options}", cli_environment, "")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "standard output: No space left on device"
    stored = [row["id"] for row in sql.execute("SELECT id FROM jsworker.jobs ORDER BY id")]
    assert stored
    assert all(str(each) in done.stderr for each in stored)


@pytest.mark.parametrize("json", ["", " --json"])
@pytest.mark.parametrize("reader", ["gone", "full disk"])
def test_what_was_done_is_told_if_stdout_cannot_be_written(
    reader: str, json: str, sql: Sql, cli_environment: Mapping[str, str]
) -> None:
    for _ in range(3):
        insert_job(sql, "queued", kind="tidy")
    command = f"cancel --kind tidy --yes{json}"
    if reader == "gone":
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as gone:
            done = _writing_to(gone, command, cli_environment, "")
    else:
        done = _onto_a_full_disk(command, cli_environment, "")
    assert done.returncode == 1
    assert sql.execute("SELECT DISTINCT status FROM jsworker.jobs").fetchall() == [{"status": "cancelled"}]
    told = "SELECT target ? 'interrupted' AS is_told FROM jsworker.audit ORDER BY part"
    actions = sql.execute(told).fetchall()
    assert actions[-1]["is_told"] is not bool(json)  # with it, stdout is written when all is done
    lines = done.stderr.splitlines()
    assert lines[0] == "done for 3; run the command again for the others"
    assert lines[1:] == ([] if reader == "gone" else ["standard output: No space left on device"])


@pytest.mark.parametrize(
    "command",
    [
        "cancel {jobs}",
        "priority {jobs} low",
        "dead-messages drop {messages}",
    ],
)
def test_the_audit_is_complete_if_stdout_fails_when_all_is_done(
    command: str, sql: Sql, cli_environment: Mapping[str, str]
) -> None:
    waiting, ended = insert_job(sql, "scheduled"), insert_job(sql, "completed")
    message = insert_message(sql, "jobs.tidy")
    named = command.format(jobs=f"{waiting} {ended}", messages=f"{message} {message + 1}")
    done = _onto_a_full_disk(named, cli_environment, "")
    assert done.returncode == 1
    assert "done for 1 of 2\n" in done.stderr
    told = sql.execute("SELECT matched, changed, target ? 'interrupted' AS is_told FROM jsworker.audit")
    parts = [(row["matched"], row["changed"], row["is_told"]) for row in told]
    assert sorted(parts) == [(1, 0, False), (1, 1, False)]


def _onto_a_full_disk(
    command: str, environment: Mapping[str, str], unbuffered: str
) -> subprocess.CompletedProcess[str]:
    with Path("/dev/full").open("wb") as full:
        return _writing_to(full, command, environment, unbuffered)


def _writing_to(
    stdout: IO[bytes], command: str, environment: Mapping[str, str], unbuffered: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *command.split()],
        env=os.environ | environment | {"PYTHONUNBUFFERED": unbuffered},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def test_text_that_the_terminal_cannot_show_is_escaped(sql: Sql, cli_environment: Mapping[str, str]) -> None:
    job_id = insert_job(sql, payload='{"name": "Grüße, 世界"}')
    done = subprocess.run(
        [*COMMAND, "job", str(job_id)],
        env=os.environ | cli_environment | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Gr\\xfc\\xdfe" in done.stdout


def test_json_is_one_document_whatever_a_target_prints(
    sql: Sql, cli_environment: Mapping[str, str], here: object
) -> None:
    done = subprocess.run(
        [*PATIENT_COMMAND, "enqueue", "cli_jobs:Double", "--payload", '{"n": 1}', "--json"],
        env=os.environ | cli_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[0]["created"] is True
    assert done.stderr == "this line is no JSON\n"
    assert sys.modules.get("cli_jobs") is None
