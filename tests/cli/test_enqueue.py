import io
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jsworker.cli import enqueue
from jsworker.ownership.transitions.expire import EXPIRE
from tests.ownership.rows import Sql, read_value

from .commands import Cli, Keyboard

NO_SERVER = "nats://127.0.0.1:1"


def leave_nats_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWORKER_NATS_URL", NO_SERVER)
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.3)


def count(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


def payload(sql: Sql) -> object:
    return read_value(sql, "SELECT payload FROM jsworker.jobs")


class TestOneJob:
    def test_its_id_is_printed_and_its_message_published(self, cli: Cli, sql: Sql) -> None:
        [job_id] = cli("enqueue", "double", "--payload", '{"n": 1}').ok().lines
        row = sql.execute("SELECT * FROM jsworker.jobs").fetchall()[0]
        assert (str(row["id"]), row["kind"], row["payload"]) == (job_id, "double", {"n": 1})
        assert (row["status"], row["needs_publish"], row["stream_seq"] > 0) == ("queued", False, True)

    def test_everything_that_can_be_said_about_it(self, cli: Cli, sql: Sql) -> None:
        options = ("--delay", 60, "--unique-key", "a.b", "--max-attempts", 7, "--max-stalls", 2)
        [one] = cli("enqueue", "double", *options, "--json").ok().json
        row = sql.execute("SELECT * FROM jsworker.jobs").fetchall()[0]
        assert one == {"id": str(row["id"]), "created": True}
        assert (row["status"], row["payload"], row["unique_key"]) == ("scheduled", {}, "a.b")
        assert (row["max_attempts"], row["max_stalls"]) == (7, 2)

    def test_when_it_is_due(self, cli: Cli, sql: Sql) -> None:
        cli("enqueue", "double", "--run-at", "2030-01-31T18:00+01:00").ok()
        row = sql.execute("SELECT * FROM jsworker.jobs").fetchall()[0]
        assert (row["status"], row["run_at"]) == ("scheduled", datetime(2030, 1, 31, 17, tzinfo=UTC))

    def test_until_when_it_may_begin(self, cli: Cli, sql: Sql) -> None:
        [job_id] = cli("enqueue", "double", "--expires-in", "3600").ok().lines
        assert "expires in " in cli("jobs", "--status", "queued").ok().out
        assert "no live worker serves its kind" in cli("job", job_id).ok().out
        assert "expires in " in cli("job", job_id).ok().out
        sql.execute("UPDATE jsworker.jobs SET expires_at = clock_timestamp() - interval '1 s'")
        sql.execute(EXPIRE.text.replace(":limit", "10").encode())
        assert "expired" in cli("jobs", "--status", "cancelled").ok().out
        told = " ".join(cli("job", job_id).ok().out.split())
        assert "cancelled: it had not begun by the time at which it expires" in told

    def test_a_unique_key_that_is_taken_prints_its_holder(self, cli: Cli, sql: Sql) -> None:
        [first] = cli("enqueue", "double", "--unique-key", "a").ok().lines
        again = cli("enqueue", "double", "--unique-key", "a")
        assert (again.code, again.lines) == (0, [first])
        assert again.errors == ["a live job has unique key a already, this one; nothing was enqueued"]
        assert cli("enqueue", "double", "--unique-key", "a", "--json").json == [
            {"id": first, "created": False}
        ]
        assert count(sql) == 1

    def test_one_that_waits_beside_one_that_runs(self, cli: Cli, sql: Sql) -> None:
        again = ("enqueue", "double", "--unique-key", "a", "--unique", "waiting")
        [first] = cli(*again).ok().lines
        assert cli(*again).errors == [
            "a waiting job has unique key a already, this one; nothing was enqueued"
        ]
        sql.execute(
            "UPDATE jsworker.jobs SET status = 'scheduled', needs_publish = false, behind = id, "
            "run_at = clock_timestamp() + interval '1 hour'"
        )
        assert f"behind {first[-8:]}, of its key" in " ".join(cli("jobs").ok().out.split())
        told = " ".join(cli("job", first).ok().out.split())
        assert f"waits for job {first} of its unique key; looked at again in" in told
        assert "a (one may wait, one may run)" in told

    def test_one_that_is_enqueued_again_and_again(self, cli: Cli, sql: Sql) -> None:
        again = ("enqueue", "double", "--unique-key", "a", "--debounce", 60, "--debounce-max", 600)
        cli(*again).ok()
        found = cli(*again, "--payload", '{"n": 2}')
        assert found.errors == ["a waiting job has unique key a already, this one; its payload was replaced"]
        assert payload(sql) == {"n": 2}
        assert "last until" in cli("job", found.lines[0]).ok().out

    def test_one_in_a_window(self, cli: Cli) -> None:
        again = ("enqueue", "double", "--unique-key", "a", "--unique-for", 60)
        [first] = cli(*again).ok().lines
        cli("cancel", first).ok()
        found = cli(*again)
        assert found.lines == [first]
        assert found.errors == ["a recent job has unique key a already, this one; nothing was enqueued"]


@pytest.mark.parametrize("several", [[], ["--count", 2]])
def test_a_terminal_is_told_that_no_worker_serves_the_kind(
    cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, several: list[object]
) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Keyboard())
    jobs = cli("enqueue", "dubble", *several).lines
    assert (len(jobs), count(sql)) == (len(several) or 1, len(several) or 1)
    assert stderr.getvalue() == "no live worker serves kind dubble: is it spelled right?\n"
    monkeypatch.setattr("sys.stderr", silent := Keyboard())
    assert len(cli("enqueue", "dubble", "--json").json) == 1
    assert silent.getvalue() == ""


class TestPayload:
    def test_from_a_file(self, cli: Cli, sql: Sql, tmp_path: Path) -> None:
        file = tmp_path / "payload.json"
        file.write_text('{"name": "Grüße"}', encoding="utf-8")
        cli("enqueue", "double", "--payload", f"@{file}").ok()
        assert payload(sql) == {"name": "Grüße"}

    def test_from_stdin(self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'["a", null]')))
        cli("enqueue", "double", "--payload", "-").ok()
        assert payload(sql) == ["a", None]

    @pytest.mark.usefixtures("here")
    def test_checked_by_the_processor_of_a_target(self, cli: Cli, sql: Sql) -> None:
        assert cli("enqueue", "cli_jobs:Double", "--payload", '{"n": 4}').code == 0
        assert payload(sql) == {"n": 4}
        found = cli("enqueue", "cli_jobs:Double", "--payload", '{"n": "many"}')
        assert (found.code, found.out) == (2, "")
        assert found.errors[-1].startswith("payload of kind double: n: Input should be a valid integer")
        assert count(sql) == 1

    @pytest.mark.parametrize(
        ("given", "line"),
        [
            ("{", "payload is not valid JSON: Expecting property name"),
            ("", "payload is not valid JSON"),
            ("NaN", "payload holds NaN"),
            ("[1e400]", "payload holds inf"),
            ('"\\u0000"', "payload holds \\u0000"),
            ('{"a": 1, "a": 2}', "payload holds a key twice"),
            ("[" * 200 + "]" * 200, "payload nests deeper than 100 levels"),
            (
                "@no-such-file.json",
                "--payload '@no-such-file.json' cannot be read: No such file or directory",
            ),
        ],
    )
    def test_what_is_no_payload_is_refused(self, given: str, line: str, cli: Cli) -> None:
        assert cli("enqueue", "double", "--payload", given).refused(2).startswith(line)

    def test_one_that_is_too_large_is_refused(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_MAX_PAYLOAD_BYTES", "10")
        line = cli("enqueue", "double", "--payload", '"123456789"').refused(2)
        assert line == "payload of 11 bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES=10"
        assert cli("enqueue", "double", "--payload", '"123456789"', "--json").json == []
        assert count(sql) == 0


class TestManyJobs:
    def test_one_id_a_line(self, cli: Cli, sql: Sql) -> None:
        found = cli("enqueue", "double", "--count", 25, "--payload", '{"n": 1}').ok()
        assert len(set(found.lines)) == 25
        assert count(sql) == 25
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0

    def test_as_json(self, cli: Cli, sql: Sql) -> None:
        found = cli("enqueue", "double", "--count", 2, "--delay", 5, "--json").ok().json
        assert [each["created"] for each in found] == [True, True]
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs WHERE status = 'scheduled'") == 2

    def test_batches_follow_each_other_under_a_progress_bar(
        self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(enqueue, "_BATCH", 10)
        monkeypatch.setattr(enqueue, "_LARGE_COUNT", 20)
        stderr = Keyboard()
        monkeypatch.setattr("sys.stderr", stderr)
        assert len(cli("enqueue", "double", "--count", 25).lines) == 25
        assert "25/25" in stderr.getvalue()
        assert count(sql) == 25

    def test_they_cannot_share_a_unique_key(self, cli: Cli) -> None:
        line = cli("enqueue", "double", "--count", 2, "--unique-key", "a").refused(2)
        assert line.startswith("--unique-key cannot be shared by --count 2 jobs")


def test_without_nats_jobs_are_stored_all_the_same(
    cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_nats_away(monkeypatch)
    found = cli("enqueue", "double", "--count", 3)
    assert (found.code, len(found.lines), count(sql)) == (0, 3, 3)
    [line] = found.errors
    assert line.startswith("stored, but not published yet, which a worker does: NATS at 127.0.0.1:1")
    assert read_value(sql, "SELECT bool_and(needs_publish) FROM jsworker.jobs") is True


def test_without_nats_nothing_is_missing_of_a_job_that_is_not_due(
    cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_nats_away(monkeypatch)
    cli("enqueue", "double", "--delay", 60).ok()
    assert count(sql) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["No Kind"], "kind 'No Kind' must match"),
        (["double", "--unique-key", "no\nkey"], r"unique key 'no\nkey' must be text of 1 to 255 printable"),
        (["double", "--delay", "-1"], "--delay -1 must be from 0 to 316224000 seconds"),
        (["double", "--delay", "nan"], "--delay nan must be from 0 to 316224000 seconds"),
        (["double", "--run-at", "tomorrow"], "--run-at 'tomorrow' must be a time with its zone, as 2030-"),
        (
            ["double", "--run-at", "2030-01-31T18:00"],
            "--run-at '2030-01-31T18:00' must be a time with its zone, as 2030-01-31T18:00+01:00",
        ),
        (
            ["double", "--run-at", "2030-01-31T18:00Z", "--delay", "5"],
            "--delay 5.0 and --run-at 2030-01-31T18:00:00+00:00: give one of them",
        ),
        (["double", "--expires-in", "0"], "--expires-in 0.0 must be more than 0 seconds"),
        (
            ["double", "--expires-in", "5", "--delay", "9"],
            "--expires-in 5.0 ends before the job is due: --delay 9.0",
        ),
        (["double", "--unique", "waiting"], "--unique 'waiting' needs --unique-key"),
        (["double", "--from", "-", "--debounce", "5"], "--debounce 5.0 needs --key-field"),
        (["double", "--unique-key", "a", "--debounce-max", "5"], "--debounce-max 5.0 needs --debounce"),
        (["double", "--unique", "some", "--unique-key", "a"], "Invalid value for '--unique'"),
        (
            ["double", "--debounce", "9", "--debounce-max", "5", "--unique-key", "a"],
            "--debounce 9.0 must not be longer than --debounce-max 5.0",
        ),
        (["double", "--unique-for", "5"], "--unique-for 5.0 needs --unique-key"),
        (["double", "--count", "0"], "Invalid value for '--count'"),
        (["double", "--max-attempts", "0"], "Invalid value for '--max-attempts'"),
        (["nowhere:Double"], "target nowhere:Double: there is no module nowhere in "),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], line: str, cli: Cli) -> None:
    assert cli("enqueue", *arguments).refused(2).startswith(line)


def test_a_payload_type_that_cannot_be_used_is_told_in_one_line(cli: Cli, here: Path) -> None:
    (here / "dangling.py").write_text(
        "from jsworker import job\nfrom pydantic import BaseModel\n"
        "class Order(BaseModel):\n    of: 'Nobody'\n@job\ndef send(order: Order): ...\n"
    )
    line = cli("enqueue", "dangling:send", "--payload", '{"of": 1}').refused(2)
    assert line.startswith("the payload type of send cannot be used: ")
    assert line.endswith(": name 'Nobody' is not defined")
