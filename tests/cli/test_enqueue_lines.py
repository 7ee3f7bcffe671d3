"""``enqueue --from``: a job for each line; wrong lines are named, and then nothing is enqueued."""

import io
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker.cli import enqueue_lines
from tests.ownership.rows import Sql, read_value
from tests.test_contents import OLD, text_of_keys

from .commands import PATIENT, Cli, Keyboard, Spawn, wait_until

TWO = '{"n": 1, "id": "a"}\n\n{"n": 2, "id": 7}'


def payloads(sql: Sql) -> list[Any]:
    return [row["payload"] for row in sql.execute("SELECT payload FROM jsworker.jobs ORDER BY id").fetchall()]


@pytest.fixture
def lines(here: Path) -> Path:
    file = here / "lines.jsonl"
    file.write_text(TWO)
    return file


class TestLines:
    def test_a_job_for_each(self, cli: Cli, sql: Sql, lines: Path) -> None:
        ids = cli("enqueue", "double", "--from", lines, "--priority", "low").ok().lines
        assert payloads(sql) == [{"n": 1, "id": "a"}, {"n": 2, "id": 7}]
        rows = sql.execute("SELECT id, priority, unique_key FROM jsworker.jobs ORDER BY id").fetchall()
        assert [tuple(row.values()) for row in rows] == [(each_id, 2, None) for each_id in map(UUID, ids)]

    def test_a_second_run_enqueues_nothing_twice(self, cli: Cli, sql: Sql, lines: Path) -> None:
        first = cli("enqueue", "double", "--from", lines, "--key-field", "id").ok()
        lines.write_text(TWO + '\n{"n": 3, "id": "c"}\n')
        again = cli("enqueue", "double", "--from", lines, "--key-field", "id")
        assert (again.code, again.lines[:2]) == (0, first.lines)
        assert again.errors == ["1 of 3 jobs were enqueued; 2 existed already"]
        found = sql.execute("SELECT unique_key FROM jsworker.jobs ORDER BY id").fetchall()
        assert [row["unique_key"] for row in found] == ["a", "7", "c"]

    def test_nor_what_has_ended_within_a_window(self, cli: Cli, sql: Sql, lines: Path) -> None:
        options = ("--from", lines, "--key-field", "id", "--unique-for", 3600, "--json")
        assert [each["created"] for each in cli("enqueue", "double", *options).ok().json] == [True, True]
        sql.execute(
            "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now(), needs_publish = false"
        )
        again = cli("enqueue", "double", *options)
        assert [each["created"] for each in again.json] == [False, False]

    def test_stdin(self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TWO.encode())))
        assert len(cli("enqueue", "double", "--from", "-").ok().lines) == 2
        assert len(payloads(sql)) == 2

    def test_many_batches(self, cli: Cli, sql: Sql, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(enqueue_lines, "_BATCH", 3)
        (here / "many").write_text("".join(f"{json.dumps({'n': n})}\n" for n in range(10)))
        assert len(cli("enqueue", "double", "--from", "many").ok().lines) == 10
        assert [each["n"] for each in payloads(sql)] == list(range(10))

    def test_a_bar_on_a_terminal_and_none_beside_json(
        self, cli: Cli, sql: Sql, lines: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(enqueue_lines, "_LARGE_BYTES", 1)
        stderr = Keyboard()
        monkeypatch.setattr(sys, "stderr", stderr)
        assert len(cli("enqueue", "double", "--from", lines).lines) == 2
        assert "checked" in stderr.getvalue()
        assert "enqueued" in stderr.getvalue()
        monkeypatch.setattr(sys, "stderr", silent := Keyboard())
        assert len(cli("enqueue", "double", "--from", lines, "--json").json) == 2
        assert (silent.getvalue(), len(payloads(sql))) == ("", 4)

    def test_no_bar_without_a_terminal(self, cli: Cli, sql: Sql, here: Path) -> None:
        (here / "many").write_text('{"text": "%s"}\n' % ("x" * 1000) * 2_000)
        done = cli("enqueue", "double", "--from", "many")
        assert (done.code, done.err, len(done.lines)) == (0, "", 2_000)
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 2_000


class TestWrongLines:
    def test_they_are_named_with_the_rule_and_nothing_is_enqueued(
        self, cli: Cli, sql: Sql, here: Path
    ) -> None:
        (here / "wrong").write_text('{"n": 1}\n{"n": \n{"n": "x"}\n{"n": 4, "n": 5}\n')
        found = cli("enqueue", "cli_jobs:Double", "--from", "wrong")
        assert (found.code, found.lines, payloads(sql)) == (2, [], [])
        printed, *named, summary = found.errors
        assert printed == "this line is no JSON"  # by the module of the processor
        assert [line.partition(": ")[0] for line in named] == ["wrong:2", "wrong:3", "wrong:4"]
        assert "is not valid JSON" in named[0]
        assert "n: Input should be a valid integer" in named[1]
        assert "holds a key twice" in named[2]
        assert summary == "3 of 4 lines are wrong; nothing was enqueued"

    def test_of_many_the_first_are_named(self, cli: Cli, sql: Sql, here: Path) -> None:
        (here / "wrong").write_text("x\n" * 30)
        found = cli("enqueue", "double", "--from", "wrong")
        assert len(found.errors) == 21
        summary = "30 of 30 lines are wrong, of which the first 20 are named; nothing was enqueued"
        assert (found.errors[-1], payloads(sql)) == (summary, [])

    def test_encrypted_ones_are_measured_as_they_are_stored(
        self, cli: Cli, sql: Sql, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_ENCRYPTION_KEYS", text_of_keys(old=OLD))
        monkeypatch.setenv("JSWORKER_MAX_PAYLOAD_BYTES", "300")
        monkeypatch.setattr(enqueue_lines, "_BATCH", 1)
        (here / "wrong").write_text(f'{{"n": 1}}\n{{"n": "{"x" * 250}"}}\n')
        found = cli("enqueue", "double", "--from", "wrong")
        assert (found.code, payloads(sql)) == (2, [])
        assert "exceeds JSWORKER_MAX_PAYLOAD_BYTES=300" in found.errors[0]

    @pytest.mark.parametrize("key", ["null", "true", '"a\\u0000b"', '""', "[1]"])
    def test_keys(self, cli: Cli, sql: Sql, here: Path, key: str) -> None:
        (here / "wrong").write_text(f'{{"id": "fine"}}\n{{"id": {key}}}\n')
        found = cli("enqueue", "double", "--from", "wrong", "--key-field", "id")
        assert (found.code, payloads(sql)) == (2, [])
        assert found.errors[0].startswith("wrong:2: ")

    def test_a_line_that_is_too_long(self, cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(enqueue_lines, "_LONGEST_LINE", 10)
        (here / "wrong").write_text("1\n[1, 2, 3, 4, 5]\n")
        line = cli("enqueue", "double", "--from", "wrong").refused(2)
        assert line == "wrong:2: longer than 10 bytes"

    def test_no_line_and_no_file(self, cli: Cli, here: Path) -> None:
        (here / "empty").write_text("\n")
        assert cli("enqueue", "double", "--from", "empty").refused(2) == "--from empty holds no line"
        line = cli("enqueue", "double", "--from", "nowhere").refused(2)
        assert line == "--from 'nowhere' cannot be read: No such file or directory"


class TestWrongUsage:
    @pytest.mark.parametrize(
        "options",
        [("--count", 2), ("--payload", "1"), ("--payload", "{}"), ("--unique-key", "a"), ("--wait",)],
    )
    def test_what_goes_without_it(self, cli: Cli, options: tuple[Any, ...]) -> None:
        line = cli("enqueue", "double", "--from", "x", *options).refused(2)
        assert line == "--from goes without --payload, --count, --unique-key and --wait"

    def test_a_field_of_nothing(self, cli: Cli) -> None:
        line = cli("enqueue", "double", "--key-field", "id").refused(2)
        assert line == "--key-field needs --from: else give --unique-key"

    def test_terms_of_keys_without_keys(self, cli: Cli, lines: Path) -> None:
        line = cli("enqueue", "double", "--from", lines, "--unique-for", 60).refused(2)
        assert line == "--unique-for 60.0 needs --key-field"


@pytest.fixture
def held_second_batch(sql: Sql, cli_environment: Mapping[str, str]) -> Iterator[psycopg.Connection[Any]]:
    """Keeps the INSERT of a job whose payload is ``n`` = 10,000 from ending until this connection lets go."""
    sql.execute(
        "CREATE FUNCTION jsworker.hold() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NULL; END $$"
    )
    sql.execute(
        "CREATE TRIGGER hold AFTER INSERT ON jsworker.jobs FOR EACH ROW"
        " WHEN (NEW.payload = '{\"n\": 10000}') EXECUTE FUNCTION jsworker.hold()"
    )
    with psycopg.connect(cli_environment["JSWORKER_DATABASE_URL"], autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(42)")
        yield holder
    sql.execute("DROP FUNCTION jsworker.hold() CASCADE")


HELD = "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


class TestStopped:
    """25,000 jobs in batches of 10,000, each of which is written by two statements at once."""

    @pytest.fixture
    def many(self, here: Path) -> Path:
        file = here / "many.jsonl"
        file.write_text("".join(f'{{"n": {n}}}\n' for n in range(25_000)))
        return file

    def test_ctrl_c_ends_it_after_the_present_batch_whose_ids_are_printed(
        self, spawn: Spawn, sql: Sql, many: Path, held_second_batch: psycopg.Connection[Any]
    ) -> None:
        process = spawn("enqueue", "double", "--from", many, "--delay", 3600, "--json", **PATIENT)
        wait_until(lambda: read_value(sql, HELD), "the second batch is being written")
        process.signal(signal.SIGINT)
        process.read_errors_until("stopping after this batch; what is enqueued stays enqueued")
        held_second_batch.execute("SELECT pg_advisory_unlock(42)")
        found = process.wait()
        assert (found.code, found.errors) == (130, ["20000 of 25000 jobs were enqueued"])
        stored = sql.execute("SELECT id FROM jsworker.jobs").fetchall()
        assert {each["id"] for each in found.json} == {str(row["id"]) for row in stored}

    @pytest.mark.usefixtures("held_second_batch")
    def test_a_second_ctrl_c_waits_for_nothing_and_says_what_is_unclear(
        self, spawn: Spawn, sql: Sql, many: Path
    ) -> None:
        process = spawn("enqueue", "double", "--from", many, "--delay", 3600, "--json", **PATIENT)
        wait_until(lambda: read_value(sql, HELD), "the second batch is being written")
        process.signal(signal.SIGINT)
        process.read_errors_until("stopping")
        process.signal(signal.SIGINT)
        found = process.wait()
        assert (found.code, len(found.json)) == (130, 10_000)
        assert found.errors[-1] == "10000 of 25000 jobs were enqueued; of the next 10000 perhaps some"

    def test_ctrl_c_before_the_first_batch_ends_it_at_once(
        self, spawn: Spawn, here: Path, many: Path
    ) -> None:
        # Else the connection is given up after two seconds, perhaps before the signal comes.
        (here / "sitecustomize.py").write_text(
            "from jsworker.ownership import pool\n"
            "pool.CONNECT_ARGUMENTS = {**pool.CONNECT_ARGUMENTS, 'connect_timeout': 60}\n"
        )
        variables = PATIENT | {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
        with socket.create_server(("127.0.0.1", 0)) as silent:
            database = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d"
            variables["JSWORKER_DATABASE_URL"] = database
            process = spawn("enqueue", "double", "--from", many, **variables)
            connection, _ = silent.accept()
            with connection:
                process.signal(signal.SIGINT)
                found = process.wait()
        assert (found.code, found.errors) == (130, ["0 of 25000 jobs were enqueued"])

    def test_an_error_in_the_second_statement_leaves_the_first_ones_jobs_unclear(
        self, cli: Cli, sql: Sql
    ) -> None:
        """They were counted as not enqueued, so that whoever repeated the command had them twice."""
        sql.execute(
            "CREATE FUNCTION jsworker.end_session() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$"
        )
        sql.execute(
            "CREATE TRIGGER end_session AFTER INSERT ON jsworker.jobs FOR EACH STATEMENT"
            " WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION jsworker.end_session()"
        )
        try:
            found = cli("enqueue", "double", "--count", 25_000, "--delay", 3600)
        finally:
            sql.execute("DROP FUNCTION jsworker.end_session() CASCADE")
        assert (found.code, found.out) == (1, "")
        assert found.errors[0] == "0 of 25000 jobs were enqueued; of the next 10000 perhaps some"
