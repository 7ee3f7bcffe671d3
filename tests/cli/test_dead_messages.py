import asyncio
import re
from collections.abc import Mapping

import nats
import pytest

from tests.ownership.rows import Sql, read_value

from .commands import Cli, Keyboard


def insert_message(sql: Sql, subject: str, data: bytes = b"{}", *, truncated: bool = False) -> int:
    row = sql.execute(
        """
        INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)
        VALUES (%s, 7, E'not \\x1bJSON', %s, %s) RETURNING id
        """,
        [subject, data, truncated],
    ).fetchone()
    assert row is not None
    return int(row["id"])


def left(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.dead_messages"))


def last_message(environment: Mapping[str, str]) -> tuple[str, bytes]:
    """Return subject and content of the newest message of the stream."""

    async def read() -> tuple[str, bytes]:
        client = await nats.connect(environment["JSWORKER_NATS_URL"])
        try:
            manager = client.jsm()
            info = await manager.stream_info(environment["JSWORKER_STREAM"])
            message = await manager.get_msg(environment["JSWORKER_STREAM"], info.state.last_seq)
            return str(message.subject), message.data or b""
        finally:
            await client.close()

    return asyncio.run(read())


@pytest.fixture
def subject(cli_environment: Mapping[str, str]) -> str:
    return f"{cli_environment['JSWORKER_SUBJECT_PREFIX']}.double"


class TestList:
    def test_the_newest_first_without_their_content(self, cli: Cli, sql: Sql) -> None:
        first, second = (
            insert_message(sql, "jobs.a", b"secret"),
            insert_message(sql, "jobs.b", b"x" * 4096, truncated=True),
        )
        for arguments in (("dead-messages",), ("dead-messages", "list")):
            found = cli(*arguments).ok()
            assert found.lines[0].split() == ["ID", "AGE", "SUBJECT", "BYTES", "REASON"]
            rows = [line.split() for line in found.lines[1:]]
            assert [(row[0], *row[2:]) for row in rows] == [
                (str(second), "jobs.b", "over", "4096", "not", "\\x1bJSON"),
                (str(first), "jobs.a", "6", "not", "\\x1bJSON"),
            ]
            assert all(re.fullmatch(r"\d+s", row[1]) for row in rows)
        as_json = cli("dead-messages", "--json").ok()
        assert [each["id"] for each in as_json.json] == [second, first]
        assert as_json.json[1].keys() == {
            *("id", "at", "subject", "stream_seq", "stored_at", "reason", "bytes", "truncated"),
        }
        limited = cli("dead-messages", "--limit", 1)
        told = f"there may be more: jsworker dead-messages --limit 1 --after {second}"
        assert (len(limited.lines), limited.errors) == (2, [told])
        rest = cli("dead-messages", "--after", second, "--json").ok().json
        assert cli("dead-messages", "--after", first).err == f"there are no dead messages behind {first}\n"
        assert [each["id"] for each in rest] == [first]
        assert cli("dead-messages", "drop", first, "--after", 1).refused(2).startswith("--after is for")


class TestDrop:
    def test_by_id(self, cli: Cli, sql: Sql) -> None:
        first, second = insert_message(sql, "jobs.a"), insert_message(sql, "jobs.a")
        found = cli("dead-messages", "drop", first, first + 1_000_000)
        assert (found.code, found.lines) == (1, [f"{first} dropped"])
        assert found.errors == [f"no dead message has id {first + 1_000_000}"]
        assert cli("dead-messages", "drop", second, "--json").ok().json == [
            {"id": second, "outcome": "dropped"}
        ]

    def test_all_after_a_question(self, cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = [insert_message(sql, "jobs.a"), insert_message(sql, "jobs.a")]
        monkeypatch.setattr("sys.stdin", Keyboard("no\n"))
        refused = cli("dead-messages", "drop", "--all")
        assert (refused.code, refused.err) == (1, "drop 2 messages? [y/N] Nothing was done.\n")
        assert left(sql) == 2
        assert cli("dead-messages", "drop", "--all", "--yes").ok().lines == [
            f"{each} dropped" for each in ids
        ]
        assert left(sql) == 0

    def test_all_of_none(self, cli: Cli, sql: Sql) -> None:
        found = cli("dead-messages", "drop", "--all", "--yes")
        assert (found.code, found.out, found.errors) == (0, "", ["there are no dead messages"])
        assert left(sql) == 0


class TestReplay:
    def test_a_message_goes_to_its_subject_as_it_was(
        self, cli: Cli, sql: Sql, subject: str, cli_environment: Mapping[str, str]
    ) -> None:
        message_id = insert_message(sql, subject, b"\x00not json")
        found = cli("dead-messages", "replay", message_id, "--json").ok()
        assert found.json == [{"id": message_id, "outcome": "replayed"}]
        assert last_message(cli_environment) == (subject, b"\x00not json")
        assert left(sql) == 0

    def test_what_cannot_be_sent_is_refused_and_kept(self, cli: Cli, sql: Sql, subject: str) -> None:
        cut = insert_message(sql, subject, truncated=True)
        strange = insert_message(sql, "somebody.elses")
        bare = insert_message(sql, "double.high")
        good = insert_message(sql, subject)
        found = cli("dead-messages", "replay", cut, strange, bare, good, good + 1)
        assert (found.code, found.lines) == (1, [f"{good} replayed"])
        assert found.errors == [
            f"message {cut} was longer than the 4096 bytes that are kept of it",
            f"message {strange} came from subject 'somebody.elses', not {subject.removesuffix('double')}KIND",
            f"message {bare} came from subject 'double.high', not {subject.removesuffix('double')}KIND",
            f"no dead message has id {good + 1}",
        ]
        assert left(sql) == 3

    def test_without_nats_nothing_is_dropped(
        self, cli: Cli, sql: Sql, subject: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        insert_message(sql, subject)
        monkeypatch.setenv("JSWORKER_NATS_URL", "nats://no-such-host.invalid:4222")
        monkeypatch.setattr("jsworker.client.dead_messages._CONNECT_SECONDS", 0.2)
        found = cli("dead-messages", "replay", "--all", "--yes")
        assert (found.code, found.out, left(sql)) == (1, "", 1)
        assert found.err.startswith("NATS at no-such-host.invalid:4222 ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["list", "1"], "dead-messages list takes no ids and no --all"),
        (["--all"], "dead-messages list takes no ids and no --all"),
        (["drop"], "dead-messages drop needs ids, or --all"),
        (["replay", "1", "--all"], "dead-messages replay takes ids or --all, not both"),
        (
            ["drop", "--all"],
            "dead-messages drop by --all asks before it acts, and here is no terminal: add --yes",
        ),
        (["drop", str(2**63)], "Invalid value for 'ID'"),
        (["list", "--after", str(2**63)], "Invalid value for '--after'"),
        (["burn"], "Invalid value for 'ACTION'"),
        (["drop", "one"], "Invalid value for 'ID'"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], line: str, cli: Cli) -> None:
    assert cli("dead-messages", *arguments).refused(2).startswith(line)
