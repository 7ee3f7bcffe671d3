"""``doctor``: a sound installation, and many unsound ones with finding, exit code and cure."""

import asyncio
import json
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import nats
import psycopg
import pytest
from nats.js.api import ConsumerConfig, DiscardPolicy, StreamConfig, SubjectTransform
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier

from jsworker.core.events import Events
from jsworker.core.settings import load_settings
from jsworker.doctor.checks import CHECKS
from jsworker.embedded import EmbeddedNats
from jsworker.embedded.resources import find_nats_server, free_port
from jsworker.ownership.transitions.audit import os_user
from jsworker.ownership.upgrading import upgrade_database
from jsworker.stream.jetstream import Stream
from tests.ownership.rows import KIND, Sql, ago, insert_job, read_value
from tests.support.servers import (
    TestServers,
    ThrowawayPostgres,
    as_role,
    let_everybody_in,
    new_servers_folder,
)

from .commands import Cli, Result, listens, wait_until

NO_ONE = "127.0.0.1:1"
CANARY = "c4n4ry-s3cret"
HOUR = 3600.0

WORKER_ROW = """
INSERT INTO jsworker.workers (
  id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)
VALUES (%s, 'alpha', 1, %s, 10, '0.1.0', '5 s', 'running', clock_timestamp() - make_interval(secs => %s))
"""
RIGHTS = """
GRANT USAGE ON SCHEMA jsworker TO {0};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA jsworker TO {0};
"""


def start_nats(folder: Path, *, config: str = "") -> EmbeddedNats:
    server = EmbeddedNats(folder, config=f"jetstream {{ sync_interval: always }}\n{config}")
    server.start()
    return server


@dataclass(frozen=True)
class Sound:
    """Servers as they should be: what is acknowledged is on the disk."""

    postgres: ThrowawayPostgres
    nats: EmbeddedNats
    template: str


@pytest.fixture(scope="module")
def sound() -> Iterator[Sound]:
    folder = new_servers_folder()
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder)
        postgres = ThrowawayPostgres(folder / "postgres")
        ends.callback(postgres.discard)
        postgres.start()
        let_everybody_in(postgres)
        server = start_nats(folder / "nats")
        ends.callback(server.stop)
        upgrade_database(postgres.create_database("template"))
        yield Sound(postgres, server, "template")


@dataclass
class World:
    """An installation of one test's own: a database, a stream, a role that may do no more than it must."""

    cli: Cli
    sql: Sql
    role: str
    stream: str

    def doctor(self, *arguments: object) -> Result:
        return self.cli("doctor", *arguments)

    def findings(self, *arguments: object) -> list[dict[str, Any]]:
        found = self.cli("doctor", "--json", *arguments)
        assert found.err == ""
        assert isinstance(found.json, list)
        return found.json

    def start_worker(self, *kinds: str, seen: float = 0.0) -> None:
        """Leave behind what a worker makes at its start: the stream, consumers, and its row."""
        asyncio.run(self._ensure(kinds))
        self.sql.execute(WORKER_ROW, [f"alpha-{secrets.token_hex(2)}", list(kinds), seen])

    async def _ensure(self, kinds: tuple[str, ...]) -> None:
        settings = load_settings()
        stream = Stream(settings, installation_id=self.installation(), events=Events(), client_name="worker")
        await stream.connect()
        try:
            await stream.ensure(kinds)
        finally:
            await stream.close()

    def installation(self) -> UUID:
        self.sql.execute(
            "INSERT INTO jsworker.installation (id) VALUES (%s) ON CONFLICT DO NOTHING", [uuid4()]
        )
        found: UUID = read_value(self.sql, "SELECT id FROM jsworker.installation")
        return found

    def change_stream(self, change: Callable[[StreamConfig], None]) -> None:
        async def update() -> None:
            client = await nats.connect(load_settings().nats_url)
            try:
                config = (await client.jetstream().stream_info(self.stream)).config
                change(config)
                await client.jetstream().update_stream(config)
            finally:
                await client.close()

        asyncio.run(update())

    def consumer(self, name: str) -> ConsumerConfig:
        async def read() -> ConsumerConfig:
            client = await nats.connect(load_settings().nats_url)
            try:
                config: ConsumerConfig = (await client.jetstream().consumer_info(self.stream, name)).config
            finally:
                await client.close()
            return config

        return asyncio.run(read())

    def change_consumer(self, kind: str, **changes: Any) -> None:
        async def update() -> None:
            client = await nats.connect(load_settings().nats_url)
            try:
                config = (await client.jetstream().consumer_info(self.stream, kind)).config
                await client.jetstream().add_consumer(
                    self.stream, ConsumerConfig(**(config.__dict__ | changes))
                )
            finally:
                await client.close()

        asyncio.run(update())


@pytest.fixture
def world(sound: Sound, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    name = f"doctor_{secrets.token_hex(4)}"
    url = sound.postgres.create_database(name, template=sound.template)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as sql:
        sql.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(name)))
        for statement in RIGHTS.strip().splitlines():
            sql.execute(SQL(statement).format(Identifier(name)))
        monkeypatch.setenv("JSWORKER_DATABASE_URL", as_role(url, name))
        monkeypatch.setenv("JSWORKER_NATS_URL", sound.nats.url)
        monkeypatch.setenv("JSWORKER_STREAM", name)
        monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", name)
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield World(cli, sql, name, name)


def the_finding(findings: list[dict[str, Any]], check: str) -> dict[str, Any]:
    """The one finding of a check."""
    [found] = [finding for finding in findings if finding["check"] == check]
    return found


def errors(findings: list[dict[str, Any]]) -> set[str]:
    return {finding["check"] for finding in findings if finding["level"] == "error"}


def assert_only_error(result: Result, check: str, *parts: str) -> dict[str, Any]:
    """Check that one check found an error, in these words, and that the exit code says so."""
    assert result.err == ""
    assert result.code == 1
    assert errors(result.json) == {check}
    found = next(each for each in result.json if each["check"] == check and each["level"] == "error")
    for part in parts:
        assert part in found["says"]
    assert found["do"]
    return dict(found)


class TestSound:
    def test_a_sound_installation_has_neither_errors_nor_warnings(self, world: World) -> None:
        world.start_worker(KIND)
        insert_job(world.sql, "queued")
        found = world.doctor("--json").ok().json
        assert {finding["level"] for finding in found} <= {"ok", "info"}
        assert {finding["check"] for finding in found} == {*CHECKS}
        assert [each for each in found if "not checked" in each["says"]] == []

    def test_findings_are_one_array_with_the_same_fields(self, world: World) -> None:
        found = json.loads(world.doctor("--json").out)
        assert isinstance(found, list)
        for finding in found:
            assert list(finding) == ["check", "level", "says", "do"]
            assert "\n" not in finding["says"]

    def test_people_see_areas_and_a_last_line(self, world: World) -> None:
        world.start_worker(KIND)
        shown = world.doctor().ok()
        headings = [line.rstrip() for line in shown.lines if line and not line.startswith(" ")]
        assert headings[:-1] == ["Settings", "PostgreSQL", "Tables", "Jobs", "NATS"]
        assert shown.lines[-1] == "0 errors, 0 warnings"

    def test_in_a_pipe_its_lines_are_for_reading(self, world: World) -> None:
        insert_job(world.sql, "queued", kind="unserved")
        lines = world.doctor().lines
        assert max(map(len, lines)) <= 120
        assert "Run a worker for unserved" in " ".join(" ".join(lines).split())

    def test_warnings_alone_are_no_failure(self, world: World) -> None:
        world.start_worker(KIND)
        insert_job(world.sql, "queued", kind="unserved")
        shown = world.doctor().ok()
        assert shown.lines[-1] == "0 errors, 1 warning"
        assert any(line.strip().startswith("do: Run a worker for unserved") for line in shown.lines)

    def test_nothing_is_written_without_fix(self, world: World) -> None:
        late_message(world)
        world.sql.execute(WORKER_ROW, ["long-gone", [KIND], 2 * 86_400])

        def everything() -> list[Any]:
            rows: list[Any] = []
            for table in ("jobs", "job_events", "workers", "installation", "dead_messages", "refused_rows"):
                rows += world.sql.execute(
                    SQL("SELECT * FROM jsworker.{}").format(Identifier(table))
                ).fetchall()
            return rows

        before = everything()
        found = world.findings()
        assert everything() == before
        assert the_finding(found, "nats.stream")["level"] == "warning"
        assert the_finding(world.findings(), "nats.stream") == the_finding(
            found, "nats.stream"
        )  # still there is none


class TestUnsoundServers:
    def test_no_postgresql(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://postgres@{NO_ONE}/jobs")
        found = world.doctor("--json")
        assert_only_error(found, "postgresql.connection", f"PostgreSQL at {NO_ONE}/jobs is not available: ")
        assert the_finding(found.json, "postgresql.connection")["do"].startswith("Check the host and port ")
        for check in (
            "postgresql.rights",
            "tables.indexes",
            "jobs.outbox",
            "nats.pairing",
        ):
            assert the_finding(found.json, check)["says"].startswith("not checked because ")
        assert the_finding(found.json, "nats.connection")["level"] == "ok"
        assert {each["level"] for each in found.json if "not checked" in each["says"]} == {"info"}

    def test_no_nats(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_NATS_URL", f"nats://{NO_ONE}")
        found = world.cli("doctor", "--json")
        assert_only_error(found, "nats.connection", f"NATS at {NO_ONE} refused the connection")
        for check in ("nats.stream", "nats.consumers", "nats.publishing"):
            assert the_finding(found.json, check)["says"].startswith("not checked because ")
        assert the_finding(found.json, "postgresql.connection")["level"] == "ok"
        assert {each["level"] for each in found.json if "not checked" in each["says"]} == {"info"}
        unknown = the_finding(world.cli("doctor", "--json", "--fix").json, "fix.unknown")
        says = "it is not known whether anything has to be mended, because NATS cannot be used"
        assert (unknown["level"], unknown["says"]) == ("warning", says)

    def test_nothing_at_all(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://postgres@{NO_ONE}/jobs")
        monkeypatch.setenv("JSWORKER_NATS_URL", f"nats://{NO_ONE}")
        found = world.cli("doctor", "--json", "--fix")
        assert found.code == 1
        assert errors(found.json) == {"postgresql.connection", "nats.connection"}
        assert {finding["check"] for finding in found.json} == {*CHECKS} | {"fix.unknown"}

    def test_a_wrong_password(self, world: World, sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
        access = sound.postgres.cluster / "pg_hba.conf"
        access.write_text(f"host all {world.role} 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        world.sql.execute("SELECT pg_reload_conf()")
        rules = "SELECT count(*) > 0 FROM pg_hba_file_rules WHERE user_name = ARRAY[%s]"
        wait_until(lambda: read_value(world.sql, rules, world.role), "the rule is loaded")
        monkeypatch.setenv("JSWORKER_DATABASE_PASSWORD", CANARY)
        found = world.doctor("--json")
        refusal = f'refused the login: password authentication failed for user "{world.role}"'
        assert_only_error(found, "postgresql.connection", refusal)
        assert the_finding(found.json, "postgresql.connection")["do"].startswith("Check the user ")
        assert CANARY not in found.out

    def test_a_database_without_tables(
        self, world: World, sound: Sound, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty = sound.postgres.create_database(f"empty_{secrets.token_hex(4)}")
        monkeypatch.setenv("JSWORKER_DATABASE_URL", empty)
        found = world.doctor("--json")
        error = assert_only_error(found, "postgresql.migration", "the database has no jsworker schema")
        assert "jsworker db upgrade" in error["do"]
        assert the_finding(found.json, "tables.indexes")["says"].startswith("not checked because ")

    def test_a_role_without_a_right_gets_the_grant_that_repairs_it(self, world: World) -> None:
        world.sql.execute(SQL("REVOKE UPDATE ON jsworker.jobs FROM {}").format(Identifier(world.role)))
        error = assert_only_error(
            world.doctor("--json"), "postgresql.rights", f"role {world.role} lacks UPDATE on jsworker.jobs"
        )
        assert error["do"] == f'GRANT UPDATE ON jsworker.jobs TO "{world.role}"'
        world.sql.execute(error["do"])
        assert world.doctor("--json").code == 0

    def test_a_role_outside_the_schema(self, world: World) -> None:
        world.sql.execute(SQL("REVOKE USAGE ON SCHEMA jsworker FROM {}").format(Identifier(world.role)))
        error = assert_only_error(
            world.doctor("--json"), "postgresql.rights", "lacks USAGE on SCHEMA jsworker"
        )
        world.sql.execute(error["do"])
        assert world.doctor("--json").code == 0

    def test_servers_that_forget(
        self, world: World, servers: TestServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The servers of the other tests do not wait for the disk."""
        url = servers.postgres.create_database(f"hasty_{secrets.token_hex(4)}", template="jsworker_template")
        monkeypatch.setenv("JSWORKER_DATABASE_URL", url)
        found = world.doctor("--json")
        assert_only_error(found, "postgresql.durability", "fsync is off")
        assert the_finding(found.json, "postgresql.rights")["level"] == "warning"

    def test_wrong_settings_are_shown_as_by_every_command(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_ACK_WAIT", "200")
        line = "JSWORKER_ACK_WAIT=200 must exceed JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5"
        assert world.cli("doctor", "--json").refused(2) == line

    def test_a_variable_that_is_no_setting(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_ACK_WIAT", "700")
        found = the_finding(world.findings(), "settings.variables")
        assert (found["level"], found["says"]) == (
            "warning",
            "JSWORKER_ACK_WIAT is no setting: did you mean JSWORKER_ACK_WAIT?",
        )

    @pytest.mark.parametrize("as_json", [True, False])
    def test_secrets_are_never_shown(
        self,
        as_json: bool,  # noqa: FBT001 -- a parameter of this test
        world: World,
        sound: Sound,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        port = sound.postgres.port
        monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://nobody:{CANARY}@127.0.0.1:{port}/jobs")
        monkeypatch.setenv("JSWORKER_NATS_URL", f"nats://someone:{CANARY}@{NO_ONE}")
        found = world.cli("doctor", "--fix", *["--json"] * as_json)
        assert found.code == 1
        assert CANARY not in found.out + found.err


BROKEN_TABLES = [
    ("DROP INDEX jsworker.jobs_due", "tables.indexes", "error", "index jobs_due is missing"),
    (
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'jsworker.jobs_queued_in_order'::regclass",
        *("tables.indexes", "error", "index jobs_queued_in_order on jobs is invalid"),
    ),
    *(
        (
            statement,
            "tables.unique_keys",
            "error",
            f"unique index {name} {wrong}: two live jobs of a kind may ",
        )
        for name, statement, wrong in (
            ("jobs_unique_live", "DROP INDEX jsworker.jobs_unique_live", "is missing"),
            (
                "jobs_unique_running",
                (
                    "UPDATE pg_index SET indisvalid = false"
                    " WHERE indexrelid = 'jsworker.jobs_unique_running'::regclass"
                ),
                "is invalid",
            ),
        )
    ),
    *(
        (
            f"DROP INDEX jsworker.{name}; CREATE {wrong}",
            *(f"tables.{check}", "error", f"index {name} is {shape}"),
        )
        for check, name, wrong, shape in (
            (
                "unique_keys",
                "jobs_unique_live",
                "INDEX jobs_unique_live ON jsworker.jobs (kind)",
                "jobs (kind), must be UNIQUE jobs (kind, unique_key) WHERE …: ",
            ),
            (
                "indexes",
                "jobs_failures",
                "INDEX jobs_failures ON jsworker.jobs (kind, lower(kind), finished_at, id)",
                "jobs (kind, …, finished_at, id), must be jobs (kind, …, finished_at, id) WHERE …: ",
            ),
        )
    ),
    (
        (
            "CREATE INDEX due_ccnew ON jsworker.jobs (run_at); UPDATE pg_index SET indisvalid = false"
            " WHERE indexrelid = 'jsworker.due_ccnew'::regclass"
        ),
        *("tables.indexes", "error", "a REINDEX CONCURRENTLY that was broken off has left it"),
    ),
    (
        "ALTER TABLE jsworker.jobs SET (autovacuum_enabled = off)",
        *("tables.vacuum", "warning", "autovacuum_enabled of table jobs is off, "),
    ),
    ("ALTER TABLE jsworker.audit SET UNLOGGED", "tables.persistence", "error", "table audit is UNLOGGED: "),
    (
        "ALTER TABLE jsworker.jobs ENABLE ROW LEVEL SECURITY",
        *(
            "tables.row_security",
            "error",
            "row-level security of table jobs hides every row from this login: ",
        ),
    ),
    (
        "ALTER TABLE jsworker.jobs ENABLE ROW LEVEL SECURITY; CREATE POLICY a ON jsworker.jobs USING (true)",
        *("tables.row_security", "warning", "of table jobs shows this login only what its policies allow"),
    ),
    (
        "ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_conservation",
        *("tables.constraints", "error", "jobs_conservation"),
    ),
    (
        "ALTER TABLE jsworker.jobs DISABLE TRIGGER jobs_guard",
        *("tables.constraints", "error", "trigger jobs_guard is disabled"),
    ),
    (
        "DROP TRIGGER jobs_live_stay_at_once ON jsworker.jobs",
        *("tables.constraints", "error", "trigger jobs_live_stay_at_once is missing"),
    ),
    (
        "ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_pkey",
        *("tables.constraints", "error", "1 constraint missing (jobs_pkey)"),
    ),
    (
        "ALTER TABLE jsworker.batch_needs DROP CONSTRAINT batch_needs_needs_fkey",
        *("tables.constraints", "error", "1 constraint missing (batch_needs_needs_fkey)"),
    ),
    ("DROP TABLE jsworker.audit", "tables.presence", "error", "table audit is missing"),
]


@pytest.mark.parametrize(("statement", "check", "level", "says"), BROKEN_TABLES)
def test_tables_out_of_shape(world: World, statement: str, check: str, level: str, says: str) -> None:
    """What doctor says to do puts most of them into shape again."""
    world.start_worker(KIND)
    world.sql.execute(statement.encode())
    found = world.doctor("--json")
    assert found.code == (1 if level == "error" else 0)
    finding = next(each for each in found.json if each["check"] == check)
    assert finding["level"] == level
    assert says in finding["says"]
    if "Restore" not in finding["do"]:
        for one in finding["do"].split("; "):  # as psql sends them
            world.sql.execute(one.encode())
        assert the_finding(world.findings(), check)["level"] == "ok"


def test_the_jobs_of_a_key_that_was_used_twice_are_found(world: World) -> None:
    world.start_worker(KIND)
    world.sql.execute("DROP INDEX jsworker.jobs_unique_live")
    twins = [insert_job(world.sql, unique_key="order 7") for _ in range(2)]
    insert_job(world.sql, unique_key="order 8")
    finding = the_finding(world.findings(), "tables.unique_keys")
    [line] = world.sql.execute(finding["says"].partition(" of each line of: ")[2].encode()).fetchall()
    assert sorted(line["jobs"]) == sorted(twins)
    with pytest.raises(psycopg.errors.UniqueViolation):
        world.sql.execute(finding["do"].encode())
    world.cli("cancel", str(twins[0])).ok()
    world.sql.execute("DROP INDEX jsworker.jobs_unique_live")
    world.sql.execute(the_finding(world.findings(), "tables.unique_keys")["do"].encode())
    assert the_finding(world.findings(), "tables.unique_keys")["level"] == "ok"


def test_a_transaction_that_holds_locks(world: World, sound: Sound) -> None:
    world.start_worker(KIND)
    job_id = insert_job(world.sql, "queued")
    assert the_finding(world.findings(), "tables.locks")["level"] == "ok"
    url = sound.postgres.database_url(world.role)
    with ThreadPoolExecutor() as threads, psycopg.connect(url) as waiter, psycopg.connect(url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [job_id])
        pid = holder.info.backend_pid
        found = the_finding(world.findings(), "tables.locks")
        assert (found["level"], f"pid {pid}, holds locks on jobs: " in found["says"]) == ("info", True)
        waits = threads.submit(waiter.execute, "LOCK TABLE jsworker.jobs IN EXCLUSIVE MODE")
        waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'jsworker.jobs'::regclass AND NOT granted"
        wait_until(lambda: read_value(world.sql, waiting) == 1, "a session waits for the lock")
        found = the_finding(world.findings(), "tables.locks")
        assert (found["level"], "; 1 session waiting for it" in found["says"]) == ("warning", True)
        world.sql.execute(found["do"].partition(": ")[2])
        waits.result(timeout=60)
        waiter.rollback()
        holder.close()
    assert the_finding(world.findings(), "tables.locks")["level"] == "ok"


def test_commits_that_wait_for_a_standby(world: World, sound: Sound) -> None:
    world.start_worker(KIND)
    job_id = insert_job(world.sql, "queued")
    url = as_role(sound.postgres.database_url(world.role), world.role)

    def configure(names: str) -> None:
        world.sql.execute(SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(names))
        world.sql.execute("SELECT pg_reload_conf()")
        wait_until(lambda: read_value(world.sql, "SHOW synchronous_standby_names") == names, "it is loaded")

    ended = threading.Event()

    def write() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not ended.is_set():  # a commit waits from the moment that the checkpointer knows the names
                connection.execute("UPDATE jsworker.jobs SET progress = 0 WHERE id = %s", [job_id])

    with ThreadPoolExecutor() as threads:
        configure("away")
        try:
            commit = threads.submit(write)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: read_value(world.sql, waiting) == 1, "the commit waits")
            behind = threads.submit(write)
            blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: read_value(world.sql, blocked) == 1, "another waits for its lock")
            found = world.doctor("--json")
            assert_only_error(found, "postgresql.commits", "no synchronous standby is connected")
            # Not to be ended: others would see what no standby has.
            assert the_finding(found.json, "tables.locks")["level"] == "ok"
        finally:
            ended.set()
            configure("")
        commit.result(timeout=60)
        behind.result(timeout=60)
    assert the_finding(world.findings(), "postgresql.commits")["level"] == "ok"


def late_message(world: World) -> UUID:
    """Leave a queued job whose message is not published."""
    return insert_job(world.sql, "queued", needs_publish=True, publish_after=ago(HOUR))


class TestJobs:
    def test_a_late_message_is_published_by_fix(self, world: World) -> None:
        world.start_worker(KIND)
        job_id = late_message(world)
        found = world.doctor("--json")
        assert found.code == 0
        finding = the_finding(found.json, "jobs.outbox")
        assert finding["level"] == "warning"
        assert finding["says"].startswith("1 queued job not published, the oldest due for 60 min")
        mended = world.findings("--fix")
        assert the_finding(mended, "fix.jobs")["says"] == "queued 0 scheduled jobs, published 1 message"
        assert the_finding(mended, "jobs.outbox")["level"] == "ok"
        [entry] = world.cli("audit", "--json").json
        assert (entry["action"], entry["target"], entry["changed"], entry["actor"]) == (
            *("doctor.repair", {"checks": ["fix.jobs"]}, 1),
            os_user(),
        )
        row = world.sql.execute("SELECT needs_publish, stream_seq FROM jsworker.jobs WHERE id = %s", [job_id])
        assert row.fetchone() == {"needs_publish": False, "stream_seq": 1}

    def test_a_repair_that_the_audit_does_not_take_is_made_and_told(self, world: World) -> None:
        world.start_worker(KIND)
        late_message(world)
        world.sql.execute(SQL("REVOKE INSERT ON jsworker.audit FROM {}").format(Identifier(world.role)))
        mended = world.findings("--fix")
        assert the_finding(mended, "fix.jobs")["level"] == "ok"
        told = the_finding(mended, "fix.audit")
        assert told["level"] == "warning"
        assert told["says"].startswith("fix.jobs is not in the audit: an entry needs INSERT on ")

    def test_the_audit_counts_the_jobs_that_a_repair_has_changed(self, world: World) -> None:
        world.start_worker(KIND)
        late_message(world)
        for _ in range(3):
            insert_job(world.sql, "scheduled", run_at=ago(HOUR))
        mended = world.findings("--fix")
        assert the_finding(mended, "fix.jobs")["says"] == "queued 3 scheduled jobs, published 4 messages"
        [entry] = world.cli("audit", "--json").json
        assert (entry["target"], entry["changed"], entry["matched"]) == ({"checks": ["fix.jobs"]}, 4, 4)

    def test_a_repair_that_fails_is_in_the_audit_with_what_it_has_changed(self, world: World) -> None:
        world.start_worker(KIND)
        for _ in range(3):
            insert_job(world.sql, "scheduled", run_at=ago(HOUR))
        world.sql.execute("UPDATE jsworker.installation SET id = uuidv7()")
        mended = world.findings("--fix")
        [told] = [each for each in mended if each["check"] == "fix.jobs"]
        assert told["level"] == "error"
        assert "another installation" in told["says"]
        [entry] = world.cli("audit", "--json").json
        assert (entry["target"], entry["changed"]) == ({"checks": ["fix.jobs"]}, 3)

    def test_a_repair_that_changes_nothing_is_not_in_the_audit(self, world: World) -> None:
        world.start_worker(KIND)
        job_id = late_message(world)
        with world.sql.transaction():
            world.sql.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [job_id])
            mended = world.findings("--fix")
        assert the_finding(mended, "fix.jobs")["says"] == "queued 0 scheduled jobs, published 0 messages"
        assert world.cli("audit", "--json").json == []

    def test_a_late_scheduled_job_is_queued_by_fix(self, world: World) -> None:
        world.start_worker(KIND)
        job_id = insert_job(world.sql, "scheduled", run_at=ago(HOUR))
        insert_job(world.sql, "scheduled")  # not due
        finding = the_finding(world.findings(), "jobs.outbox")
        assert finding["level"] == "warning"
        assert finding["says"].startswith("1 scheduled job due and not queued, the oldest for 60 min")
        mended = world.findings("--fix")
        assert the_finding(mended, "fix.jobs")["says"] == "queued 1 scheduled job, published 1 message"
        assert read_value(world.sql, "SELECT status FROM jsworker.jobs WHERE id = %s", job_id) == "queued"

    def test_queued_jobs_of_a_kind_without_workers(self, world: World) -> None:
        world.start_worker("other")
        for _ in range(3):
            insert_job(world.sql, "queued", queued_at=ago(HOUR))
        insert_job(world.sql, "queued", kind="other")
        found = [each for each in world.findings() if each["check"] == "jobs.queues"]
        assert [(each["level"], each["says"]) for each in found] == [
            (
                "warning",
                f"3 queued jobs of kind {KIND}, the oldest waiting for 60 min, and no worker claims them",
            ),
            ("ok", found[1]["says"]),
        ]

    def test_many_are_counted_up_to_a_bound(self, world: World) -> None:
        world.sql.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at) "
            "SELECT uuidv7(), 'many', '{}', 'queued', 1, now() FROM generate_series(1, 1500)"
        )
        assert the_finding(world.findings(), "jobs.queues")["says"].startswith(
            "more than 1,000 queued jobs of kind many"
        )

    def test_no_worker_while_jobs_wait(self, world: World) -> None:
        world.start_worker(KIND, seen=HOUR)
        assert the_finding(world.findings(), "jobs.workers")["level"] == "info"
        insert_job(world.sql, "queued")
        assert the_finding(world.findings(), "jobs.workers")["level"] == "warning"

    def test_jobs_of_an_owner_without_signs_of_life(self, world: World) -> None:
        world.start_worker(KIND)
        insert_job(world.sql, "processing", worker_id="gone-1-aaaa", last_activity_at=ago(HOUR))
        insert_job(world.sql, "processing", worker_id="alive-1-aaaa")  # its row comes with its next heartbeat
        finding = the_finding(world.findings(), "jobs.owners")
        assert finding["level"] == "warning"
        line = "1 running job of worker gone-1-aaaa, which is not in the registry, silent for 60 min"
        assert finding["says"] == line

    def test_refused_rows_are_shown_and_tried_again_by_fix(self, world: World) -> None:
        world.start_worker(KIND)
        assert the_finding(world.findings(), "jobs.refused_rows")["level"] == "ok"
        job_id = insert_job(world.sql, "scheduled", run_at=ago(3600))
        mark = (
            "INSERT INTO jsworker.refused_rows (job_id, attempted, kind, status, fencing_token, dispatch,"
            " sqlstate, constraint_name, retry_at)"
            " VALUES (%s, %s, 'k', 'scheduled', 0, 0, %s, %s, clock_timestamp() + interval '1 hour')"
        )
        world.sql.execute(mark, [job_id, "promote", "P0001", None])
        found = world.findings()
        says = the_finding(found, "jobs.refused_rows")["says"]
        assert says.startswith("1 job set aside: PostgreSQL refuses to promote, SQLSTATE P0001, first ")
        assert says.endswith(f"one of them {job_id}")
        assert the_finding(found, "jobs.outbox")["level"] == "ok"  # no relay is missing
        mended = world.findings("--fix")
        assert (
            the_finding(mended, "fix.refused_rows")["says"]
            == "1 refused row tried again by the workers' next rounds"
        )
        assert read_value(world.sql, "SELECT count(*) FROM jsworker.refused_rows") == 0
        for action in ("NO ACTION", "RESTRICT"):  # PostgreSQL 18 has a SQLSTATE for each
            world.sql.execute(
                SQL(
                    "CREATE TABLE orders (id uuid CONSTRAINT {} REFERENCES jsworker.jobs ON DELETE {})"
                ).format(Identifier(action), SQL(action))
            )
            old = insert_job(world.sql, "completed", finished_at=ago(9 * 86_400))
            world.sql.execute("INSERT INTO orders VALUES (%s)", [old])
            assert world.cli("prune", "--json").json["kept"] == 1
            world.sql.execute("DROP TABLE orders")
            kept = the_finding(world.findings(), "jobs.refused_rows")
            assert kept["level"] == "info"
            assert kept["says"].endswith(f"a foreign key refers to them, {action}")
            world.sql.execute(mark, [job_id, "promote", "P0001", None])
            by_trigger = insert_job(world.sql, "scheduled", run_at=ago(3600))
            world.sql.execute(mark, [by_trigger, "prune", "P0001", None])
            mended = world.findings("--fix")
            assert the_finding(mended, "fix.refused_rows")["says"].startswith("2 refused rows tried again")
            left = world.sql.execute(
                "DELETE FROM jsworker.refused_rows RETURNING job_id, attempted"
            ).fetchall()
            assert [(row["job_id"], row["attempted"]) for row in left] == [(old, "prune")]
            world.sql.execute("DELETE FROM jsworker.jobs WHERE id = %s", [old])

    def test_a_refused_row_that_stays_keeps_no_other_one_from_being_tried_again(self, world: World) -> None:
        """As one does that a worker notes again at this very moment."""
        world.start_worker(KIND)
        world.sql.execute(
            "INSERT INTO jsworker.refused_rows"
            " (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, retry_at)"
            " SELECT uuidv7(), 'expire', 'k-' || n, 'queued', 0, 0, 'P0001', now()"
            " FROM generate_series(1, 1400) AS n"
        )
        world.sql.execute(
            "CREATE FUNCTION stay() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER stays BEFORE DELETE ON jsworker.refused_rows FOR EACH ROW"
            " WHEN (old.kind = 'k-1') EXECUTE FUNCTION stay()"
        )
        assert the_finding(world.findings("--fix"), "fix.refused_rows")["says"].startswith("1,399 refused")

    def test_a_sequence_that_is_behind_its_rows(self, world: World) -> None:
        """As it is on the subscriber of a logical replication, to which no sequence is copied."""
        world.start_worker(KIND)
        job_id = insert_job(world.sql, "scheduled", run_at=ago(0))
        event = "INSERT INTO jsworker.job_events (job_id, event) VALUES (%s, 'released')"
        for _ in range(3):
            world.sql.execute(event, [job_id])
        world.sql.execute("ALTER TABLE jsworker.job_events ALTER COLUMN id RESTART")
        with pytest.raises(psycopg.errors.UniqueViolation) as refused:
            world.sql.execute(event, [job_id])
        world.sql.execute(
            "INSERT INTO jsworker.refused_rows (job_id, attempted, kind, status, fencing_token, dispatch,"
            " sqlstate, constraint_name, retry_at)"
            " VALUES (%s, 'reset', 'k', 'processing', 1, 1, %s, %s, now())",
            [job_id, refused.value.sqlstate, refused.value.diag.constraint_name],
        )
        finding = the_finding(world.findings(), "jobs.refused_rows")
        assert finding["level"] == "error"
        assert "the sequence of jsworker.job_events is behind its rows" in finding["says"]
        world.sql.execute(finding["do"].partition(": ")[2].partition(";")[0].encode())
        world.sql.execute(event, [job_id])

    def test_failures_dead_messages_and_what_was_kept_too_long(self, world: World) -> None:
        world.start_worker(KIND)
        for _ in range(20):
            insert_job(world.sql, "failed")
        insert_job(world.sql, "completed", finished_at=ago(30 * 86_400))
        world.sql.execute("INSERT INTO jsworker.dead_messages (subject, reason, data) VALUES ('s', 'r', '')")
        found = world.findings()
        assert the_finding(found, "jobs.failures")["says"].startswith("20 of the last 21 ended jobs failed")
        assert the_finding(found, "jobs.pruning")["says"].startswith("the oldest ended job is 30 d old")
        assert the_finding(found, "jobs.dead_messages")["says"].startswith("1 dead message, the newest ")
        for check in ("jobs.failures", "jobs.pruning", "jobs.dead_messages"):
            assert the_finding(found, check)["level"] == "warning"

    def test_a_job_that_cannot_be_deleted_hides_no_other(self, world: World) -> None:
        mark = (
            "INSERT INTO jsworker.refused_rows (job_id, attempted, kind, status, fencing_token, dispatch,"
            " sqlstate, retry_at) SELECT id, 'prune', kind, status, fencing_token, dispatch, '23503', now()"
            " FROM jsworker.jobs WHERE id = %s"
        )

        def said() -> list[str]:
            found = [each for each in world.findings() if each["check"] == "jobs.pruning"]
            return [each["says"][:40] for each in found if each["level"] != "ok"]

        kept = insert_job(world.sql, "completed", finished_at=ago(60 * 86_400))
        world.sql.execute(mark, [kept])
        refused = "ended jobs are kept that PostgreSQL refuses to delete: see jobs.refused_rows"[:40]
        assert said() == [refused]
        insert_job(world.sql, "completed", finished_at=ago(30 * 86_400))
        assert said() == [refused, "the oldest ended job is 30 d old, though JSWORKER"[:40]]


class TestNats:
    def test_a_missing_stream_is_made_by_fix(self, world: World) -> None:
        world.sql.execute(WORKER_ROW, ["alpha", [KIND], 0])
        assert the_finding(world.findings(), "nats.stream")["level"] == "warning"
        mended = world.findings("--fix")
        assert f"made stream {world.stream}" in the_finding(mended, "fix.stream")["says"]
        assert f"made consumer {KIND}" in the_finding(mended, "fix.stream")["says"]
        for check in ("nats.stream", "nats.pairing", "nats.consumers", "nats.service"):
            assert the_finding(mended, check)["level"] == "ok"

    def test_a_stream_of_another_installation_is_left_alone(self, world: World) -> None:
        world.start_worker(KIND)
        own = uuid4()
        world.sql.execute("UPDATE jsworker.installation SET id = %s", [own])
        error = assert_only_error(
            world.doctor("--json"),
            "nats.pairing",
            "belongs to another installation",
            f"this database is {own}",
        )
        assert "JSWORKER_STREAM" in error["do"]
        assert the_finding(world.findings("--fix"), "fix.nothing")
        world.sql.execute(WORKER_ROW, ["beta", ["other"], 0])
        [missing] = [
            each for each in world.findings() if each["level"] == "error" and each["check"] == "nats.service"
        ]
        assert missing["do"] == "First mend the stream (above)."

        def discard_old(config: StreamConfig) -> None:
            config.discard = DiscardPolicy.OLD

        world.change_stream(discard_old)
        different = the_finding(world.findings(), "nats.stream")
        assert different["do"] == "Leave it: it belongs to another installation (below)."
        world.change_consumer(KIND, ack_wait=100.0)
        assert the_finding(world.findings(), "nats.consumers")["do"] == "First mend the stream (above)."

    def test_a_wrong_discard_policy_is_changed_by_fix(self, world: World) -> None:
        world.start_worker(KIND)

        def discard_old(config: StreamConfig) -> None:
            config.discard = DiscardPolicy.OLD

        world.change_stream(discard_old)
        assert_only_error(world.doctor("--json"), "nats.stream", "discard=old, must be new")
        mended = world.findings("--fix")
        assert (
            the_finding(mended, "fix.stream")["says"] == f"stream {world.stream}: discard is new now, was old"
        )
        assert errors(mended) == set()

    def test_a_stream_that_cannot_be_purged_is_told(self, world: World) -> None:
        def deny_delete(config: StreamConfig) -> None:
            config.deny_delete = True

        def deny_purge(config: StreamConfig) -> None:
            config.discard, config.deny_purge = DiscardPolicy.OLD, True

        world.start_worker(KIND)
        world.change_stream(deny_delete)  # no worker deletes a message by its number
        assert the_finding(world.findings(), "nats.stream")["level"] == "ok"
        world.change_stream(deny_purge)
        assert "discard=old" in the_finding(world.findings(), "nats.stream")["says"]
        mended = the_finding(world.findings("--fix"), "nats.stream")
        assert mended["level"] == "warning"
        assert mended["says"].startswith(f"stream {world.stream} has deny_purge")
        assert mended["do"].endswith(f": `nats stream rm {world.stream}`.")

    def test_a_stream_that_cannot_be_used(self, world: World) -> None:
        async def make() -> None:
            client = await nats.connect(load_settings().nats_url)
            try:
                await client.jetstream().add_stream(
                    StreamConfig(name=world.stream, subjects=[f"{world.stream}.*"])
                )
            finally:
                await client.close()

        asyncio.run(make())
        world.sql.execute(WORKER_ROW, ["alpha", [KIND], 0])
        found = world.doctor("--json", "--fix")
        assert found.code == 1
        assert "retention=limits, must be workqueue" in str(found.json)
        assert the_finding(found.json, "fix.nothing")
        missing = the_finding(found.json, "nats.service")
        assert "there is no consumer of this name" in missing["says"]
        assert missing["do"] == "First mend the stream (above)."

    def test_a_consumer_that_delivers_again_too_early_is_changed_by_fix(self, world: World) -> None:
        world.start_worker(KIND)
        world.change_consumer(KIND, ack_wait=100.0)
        line = "must exceed JSWORKER_STALE_THRESHOLD=300 + 2 × JSWORKER_SCAN_INTERVAL=5"
        assert_only_error(
            world.doctor("--json"), "nats.consumers", f"consumer {KIND} has ack_wait=100 s", line
        )
        mended = world.findings("--fix")
        assert "ack_wait is 600 now, was 100" in the_finding(mended, "fix.stream")["says"]
        assert errors(mended) == set()

    def test_that_other_processes_may_have_another_prefix_is_said(self, world: World) -> None:
        world.start_worker(KIND)

        def add_prefix(config: StreamConfig) -> None:
            config.subjects = [*(config.subjects or ()), "beside-doctor.*"]

        world.change_stream(add_prefix)
        world.change_consumer(KIND, filter_subject=f"beside-doctor.{KIND}")
        wrong = the_finding(world.findings(), "nats.consumers")
        assert f"filter_subject=beside-doctor.{KIND}, must be {world.stream}.{KIND}" in wrong["says"]
        assert "If it comes back: other processes have JSWORKER_SUBJECT_PREFIX=beside-doctor." in wrong["do"]
        assert errors(world.findings("--fix")) == set()

    def test_fix_changes_what_can_be_changed_beside_a_consumer_that_cannot_be_made(
        self, world: World
    ) -> None:
        world.start_worker(KIND)
        world.change_consumer(
            KIND, name="=taken=", durable_name="=taken=", filter_subject=f"{world.stream}.before"
        )
        world.sql.execute(WORKER_ROW, ["beta", ["before"], 0])
        world.change_consumer(KIND, max_deliver=3)
        mended = world.findings("--fix")
        done, refused = (each for each in mended if each["check"] == "fix.stream")
        assert "max_deliver is -1 now, was 3" in done["says"]
        assert (done["level"], refused["level"]) == ("ok", "error")
        assert f"consumer before of stream {world.stream} cannot be made" in refused["says"]

    def test_a_consumer_of_somebody_else_is_named_and_left_alone(self, world: World) -> None:
        world.start_worker(KIND)
        subject = f"{world.stream}.resize"
        world.change_consumer(KIND, name="audit", durable_name="audit", filter_subject=subject)
        world.sql.execute(WORKER_ROW, ["beta", ["resize"], 0])
        found = world.findings()
        assert errors(found) == {"nats.consumers", "nats.service"}
        foreign = the_finding(found, "nats.consumers")
        assert f"consumer audit is none of a kind of jobs, and takes messages of {subject}" in foreign["says"]
        assert f"`nats consumer rm {world.stream} audit`" in foreign["do"]
        missing = the_finding(found, "nats.service")
        assert "workers for resize are alive, and there is no consumer" in missing["says"]
        assert missing["do"] == "First delete consumer audit (above)."
        refused = the_finding(world.findings("--fix"), "fix.stream")
        assert f"consumer resize of stream {world.stream} cannot be made" in refused["says"]
        assert world.consumer("audit").filter_subject == subject

    def test_what_stream_ensure_changes_is_shown_as_in_findings(self, world: World) -> None:
        def transform(config: StreamConfig) -> None:
            config.subject_transform = SubjectTransform(src=f"{world.stream}.*", dest=f"{world.stream}.x")

        world.start_worker(KIND)
        world.change_stream(transform)
        shown = f"subject_transform [src {world.stream}.*, dest {world.stream}.x] -> none"
        assert f"stream {world.stream}: {shown}" in world.cli("stream", "ensure", KIND).ok().lines

    def test_another_applications_consumer_of_a_further_subject_is_left_alone(self, world: World) -> None:
        def add_subject(config: StreamConfig) -> None:
            config.subjects = [*(config.subjects or ()), "billing.invoices"]

        world.start_worker(KIND)
        world.change_stream(add_subject)
        audit = {"name": "audit", "durable_name": "audit", "filter_subject": "billing.invoices"}
        world.change_consumer(KIND, **audit, ack_wait=30.0, max_deliver=5)
        assert not [each for each in world.findings() if "audit" in each["says"]]
        assert the_finding(world.findings("--fix"), "fix.nothing")
        kept = world.consumer("audit")
        assert (kept.filter_subject, kept.ack_wait, kept.max_deliver) == ("billing.invoices", 30.0, 5)

    def test_a_consumer_that_waits_longer_is_left_alone(self, world: World) -> None:
        world.start_worker(KIND)
        world.change_consumer(KIND, ack_wait=4000.0)
        assert errors(world.findings()) == set()
        assert the_finding(world.findings("--fix"), "fix.nothing")

    def test_a_stream_that_has_the_subjects_of_the_priorities_is_named(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def make() -> None:
            client = await nats.connect(load_settings().nats_url)
            try:
                await client.jetstream().add_stream(name="EU", subjects=[f"{world.stream}.eu.*"])
            finally:
                await client.close()

        asyncio.run(make())
        world.start_worker(KIND)
        found = world.findings()
        assert errors(found) == set()
        overlap = the_finding(found, "nats.stream")
        assert overlap["level"] == "warning"
        assert "stream EU has one that overlaps" in overlap["says"]
        assert the_finding(world.findings("--fix"), "fix.nothing")
        assert "another JSWORKER_SUBJECT_PREFIX" in overlap["do"]
        monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", f"{world.stream}-us")
        world.start_worker(KIND)
        assert the_finding(world.findings(), "nats.stream")["level"] == "ok"

    def test_a_consumer_that_no_worker_would_change_is_changed_by_fix(self, world: World) -> None:
        world.start_worker("gone")
        world.change_consumer("gone", max_deliver=3)
        assert "may do so change it" in the_finding(world.findings(), "nats.consumers")["do"]
        world.sql.execute("UPDATE jsworker.workers SET kinds = '{other}'")
        wrong = the_finding(world.findings(), "nats.consumers")
        assert wrong["do"] == "`jsworker doctor --fix` changes it; no worker that would is alive."
        mended = world.findings("--fix")
        assert the_finding(mended, "nats.consumers")["level"] == "ok"

    def test_a_consumer_without_workers(self, world: World) -> None:
        world.start_worker("gone", "old")
        world.sql.execute("DELETE FROM jsworker.workers")
        world.start_worker(KIND)
        finding = the_finding(world.findings(), "nats.service")
        assert finding["level"] == "info"
        assert finding["says"] == "no message is in 2 consumers without a live worker: gone, old"

    def test_messages_that_no_consumer_takes(self, world: World) -> None:
        world.start_worker(KIND)
        assert the_finding(world.findings(), "nats.subjects")["level"] == "ok"
        world.cli("enqueue", "ghost", "--count", "3")
        finding = the_finding(world.findings(), "nats.subjects")
        assert finding["level"] == "warning"
        assert finding["says"].startswith("3 messages of 1 subject that no consumer takes: ")
        assert finding["says"].endswith(".ghost")

    def test_a_priority_whose_consumer_is_not_made(self, world: World) -> None:
        world.start_worker(KIND)
        world.cli("enqueue", KIND, "--priority", "high")
        world.cli("enqueue", "ghost")
        found = {each["says"]: each["do"] for each in world.findings() if each["check"] == "nats.subjects"}
        [served] = [says for says in found if f".{KIND}.high, and workers of these kinds are alive" in says]
        assert "worker.degraded" in found.pop(served)
        [(unserved, do)] = found.items()
        assert unserved.endswith(".ghost")
        assert "Run workers for these kinds" in do

    def test_a_missing_permission_is_named(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        users = 'users: [{user: "w", password: "p", permissions: {publish: ["$JS.API.INFO"]}}]'
        server = start_nats(tmp_path / "nats", config=f"authorization {{ {users} }}")
        with_login = {"NATS_URL": server.url, "NATS_USER": "w", "NATS_PASSWORD": "p"}
        for name, value in with_login.items():
            monkeypatch.setenv(f"JSWORKER_{name}", value)
        try:
            found = world.cli("doctor", "--json")
        finally:
            server.stop()
        error = assert_only_error(
            found, "nats.stream", "permissions violation", f"$js.api.stream.info.{world.stream}"
        )
        assert "permission" in error["do"]

    def test_a_wrong_nats_password(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        login = 'authorization { user: "w", password: "right" }'
        server = start_nats(tmp_path / "nats", config=login)
        for name, value in {"URL": server.url, "USER": "w", "PASSWORD": CANARY}.items():
            monkeypatch.setenv(f"JSWORKER_NATS_{name}", value)
        try:
            found = world.cli("doctor", "--json")
        finally:
            server.stop()
        assert_only_error(found, "nats.connection", "refused the login: authorization violation")
        assert CANARY not in found.out

    def test_without_jetstream(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        port = free_port()
        command = [str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(port)]
        monkeypatch.setenv("JSWORKER_NATS_URL", f"nats://127.0.0.1:{port}")
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                wait_until(lambda: listens(port), "nats-server listens")
                found = world.cli("doctor", "--json")
            finally:
                server.kill()
        assert found.code == 1
        finding = the_finding(found.json, "nats.stream")
        assert finding["says"] == f"NATS at 127.0.0.1:{port} has JetStream disabled"
        assert "If it is a leaf node, connect to the servers that have the stream" in finding["do"]


def test_the_environment_is_that_of_every_command(cli: Cli, cli_environment: Mapping[str, str]) -> None:
    found = cli("doctor", "--json")
    assert the_finding(found.json, "postgresql.connection")["level"] == "ok"
    assert cli_environment["JSWORKER_STREAM"] in the_finding(found.json, "nats.stream")["says"]
