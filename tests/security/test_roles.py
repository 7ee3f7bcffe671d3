"""PostgreSQL's shipped roles: each can do its own and is refused the others'."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import text

from jsworker.core.errors import DatabaseRefused, TransitionRefused
from jsworker.ownership.database import OLDEST_REVISION
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_report import DEAD_MESSAGES
from jsworker.ownership.queries.server_report import read_missing_rights, read_server
from jsworker.ownership.transitions import control, prune, workers
from jsworker.ownership.transitions.enqueue import JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import enqueue_many, enqueue_one
from jsworker.ownership.upgrading import _LOCK, current_revision, upgrade_database
from tests.ownership.calls import opened
from tests.ownership.rows import Sql, insert_job
from tests.security.guarded import LOGINS, ROLES, Guarded, apply_roles, guard, make_logins
from tests.support.servers import TestServers, as_role

OWN_DATABASE = ROLES.with_name("own-database.sql")


def insert(**columns: str) -> str:
    """Return the INSERT of a queued job with further columns."""
    row = {
        "id": "gen_random_uuid()",
        "kind": "'echo'",
        "payload": "'{}'",
        "status": "'queued'",
        "dispatch": "1",
        "queued_at": "clock_timestamp()",
    } | columns
    return f"INSERT INTO jsworker.jobs ({', '.join(row)}) VALUES ({', '.join(row.values())})"  # noqa: S608 -- constants of this file


SCHEDULE = (
    "INSERT INTO jsworker.schedules (name, kind, payload, rule, tz, missed, overlap, next_at, set_by)"
    " VALUES ('s', 'echo', '{}', 'every 60 s', 'UTC', 'skip', 'allow', clock_timestamp(), 'operator')"
)

ENQUEUE = "SELECT * FROM jsworker.enqueue('echo', '{}', unique_key => 'k', delay => '1 hour')"
WORKFLOW = "INSERT INTO jsworker.workflows (id, name) VALUES (gen_random_uuid(), 'nightly')"

AUDIT = (
    "INSERT INTO jsworker.audit (action_id, part, actor, action, target, matched, changed)"
    " VALUES (gen_random_uuid(), 1, 'ann', 'retry', '{}', 1, 1)"
)

MAY: dict[str, list[str]] = {
    "owner": [
        "CREATE TABLE jsworker.extra (id int)",
        "ALTER TABLE jsworker.jobs ADD COLUMN extra int",
        "DROP TABLE jsworker.dead_messages",
    ],
    "worker": [
        ENQUEUE,
        "SELECT payload, result FROM jsworker.jobs",
        "UPDATE jsworker.jobs SET fencing_token = fencing_token + 1",
        "DELETE FROM jsworker.jobs WHERE status = 'completed'",
        "INSERT INTO jsworker.job_events (job_id, event) VALUES (gen_random_uuid(), 'claimed')",
        "DELETE FROM jsworker.job_events",
        "DELETE FROM jsworker.workers",
        "DELETE FROM jsworker.dead_messages",
        "DELETE FROM jsworker.refused_rows",
        "UPDATE jsworker.refused_rows SET tries = 2",
        "DELETE FROM jsworker.untold_resets",
        SCHEDULE,
        "UPDATE jsworker.schedules SET paused = true",
        "DELETE FROM jsworker.schedules",
        "DELETE FROM jsworker.unique_windows",
        "INSERT INTO jsworker.job_steps (job_id, name, fencing_token) VALUES (gen_random_uuid(), 'a', 1)",
        "DELETE FROM jsworker.job_steps",
        WORKFLOW,
        "UPDATE jsworker.workflows SET revision = revision + 1",
        "UPDATE jsworker.batches SET generation = generation + 1",
        "DELETE FROM jsworker.workflows",
        "INSERT INTO jsworker.limits (kind, key) VALUES ('echo', 'a')",
        "UPDATE jsworker.limits SET used_at = now()",
        "UPDATE jsworker.statistics SET started = 1",
        "DELETE FROM jsworker.statistics",
        AUDIT,
        "DELETE FROM jsworker.audit",
        "DELETE FROM jsworker.limits",
        (
            "INSERT INTO jsworker.untold_resets (job_id, kind, status, fencing_token, dispatch, owner,"
            " stalls) VALUES (gen_random_uuid(), 'echo', 'queued', 1, 2, 'w', 0)"
        ),
    ],
    "producer": [
        insert(),
        ENQUEUE,
        insert(waiting_key="'a'", expires_at="now() + interval '1 h'"),
        (
            "INSERT INTO jsworker.unique_windows AS w VALUES ('echo', 'a', gen_random_uuid(), now())"
            " ON CONFLICT (kind, key) DO UPDATE SET until = excluded.until WHERE w.until < now()"
        ),
        "SELECT id FROM jsworker.jobs WHERE kind = 'echo' AND waiting_key = 'a' AND status = 'queued'",
        "SELECT job_id FROM jsworker.unique_windows FOR UPDATE",  # more than it needs: SECURITY.md, X16
        insert(limit_key="'tenant-7'"),
        "SELECT id, kind, unique_key, status, dispatch FROM jsworker.jobs",
        "SELECT version_num FROM jsworker.alembic_version",
        WORKFLOW,
        "INSERT INTO jsworker.batch_needs (batch, needs) SELECT w, w FROM gen_random_uuid() AS w WHERE false",
        insert(
            status="'scheduled'",
            dispatch="0",
            held_by="'needs'",
            held_at="now()",
            batch_id="gen_random_uuid()",
        ),
    ],
    "publisher": [
        insert(),
        ENQUEUE,
        "UPDATE jsworker.jobs SET needs_publish = false, stream_seq = 1 WHERE status = 'queued'",
        "SELECT id FROM jsworker.jobs WHERE needs_publish FOR NO KEY UPDATE",
    ],
    "debouncer": [
        insert(),
        (
            insert(waiting_key="'a'", debounce_until="now()") + " ON CONFLICT (kind, waiting_key)"
            " WHERE waiting_key IS NOT NULL AND status IN ('scheduled', 'queued')"
            " DO UPDATE SET payload = '{}', checkpoint = NULL, run_at = least(excluded.run_at, jobs.run_at)"
        ),
        # More than it needs: SECURITY.md, X16.
        "UPDATE jsworker.jobs SET payload = '{}', limit_key = NULL WHERE status = 'processing'",
        "UPDATE jsworker.jobs SET expires_at = now() WHERE status = 'scheduled'",
    ],
    "operator": [
        ENQUEUE,
        SCHEDULE,
        WORKFLOW,
        AUDIT,
        "SELECT payload, result FROM jsworker.jobs FOR UPDATE",
        "UPDATE jsworker.jobs SET priority = 0",
        "INSERT INTO jsworker.job_events (job_id, event) VALUES (gen_random_uuid(), 'retried')",
        "UPDATE jsworker.batches SET generation = generation + 1",
        "INSERT INTO jsworker.limits (kind, key) VALUES ('echo', 'a')",
        "DELETE FROM jsworker.schedules",
        "DELETE FROM jsworker.dead_messages",
        "UPDATE jsworker.workers SET drained_at = now()",
        "SELECT * FROM jsworker.statistics, jsworker.audit, jsworker.workers",
    ],
    "reader": [
        "SELECT * FROM jsworker.jobs",
        "SELECT * FROM jsworker.job_events",
        "SELECT * FROM jsworker.workers",
        "SELECT * FROM jsworker.dead_messages",
        "SELECT * FROM jsworker.refused_rows",
        "SELECT * FROM jsworker.schedules",
        "SELECT * FROM jsworker.job_steps",
        "SELECT * FROM jsworker.workflows, jsworker.batches, jsworker.batch_needs",
        "SELECT * FROM jsworker.limits",
        "SELECT * FROM jsworker.statistics",
        "SELECT * FROM jsworker.audit",
        "SELECT * FROM jsworker.installation",
    ],
    "metrics": [
        "SELECT kind, status, count(*), min(queued_at) FROM jsworker.jobs GROUP BY 1, 2",
        "SELECT state, max(last_seen_at) FROM jsworker.workers GROUP BY 1",
        "SELECT kind, held_by, count(*), min(held_at) FROM jsworker.jobs GROUP BY 1, 2",
        "SELECT kind, max_running, rate, per FROM jsworker.limits",
    ],
}

MAY_NOT: dict[str, list[str]] = {
    "owner": ["CREATE ROLE thief", "SELECT pg_read_file('/etc/hostname')"],
    "worker": [
        "DROP TABLE jsworker.jobs",
        "TRUNCATE jsworker.jobs",
        "CREATE TABLE jsworker.extra (id int)",
        "ALTER TABLE jsworker.jobs DISABLE TRIGGER jobs_guard",
        "ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_conservation",
        "CREATE FUNCTION jsworker.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "UPDATE jsworker.job_events SET event = 'claimed'",
        "UPDATE jsworker.job_steps SET result = '1'",
        "UPDATE jsworker.audit SET actor = 'somebody else'",
        "UPDATE jsworker.untold_resets SET kind = 'other'",
        "UPDATE jsworker.installation SET id = gen_random_uuid()",
        "DELETE FROM jsworker.installation",
        "UPDATE jsworker.alembic_version SET version_num = '0000'",
        "DELETE FROM jsworker.alembic_version",
        "SET ROLE jsworker_owner",
    ],
    "producer": [
        SCHEDULE,
        "DELETE FROM jsworker.unique_windows",
        "SELECT * FROM jsworker.job_steps",
        "INSERT INTO jsworker.job_steps (job_id, name, fencing_token) VALUES (gen_random_uuid(), 'a', 1)",
        "UPDATE jsworker.workflows SET revision = revision + 1",
        "UPDATE jsworker.batches SET generation = generation + 1",
        "SELECT * FROM jsworker.batches",
        "DELETE FROM jsworker.workflows",
        "SELECT * FROM jsworker.limits",
        "INSERT INTO jsworker.limits (kind, key) VALUES ('echo', 'a')",
        "SELECT * FROM jsworker.statistics",
        "SELECT * FROM jsworker.audit",
        AUDIT,
        "SELECT id FROM jsworker.jobs FOR UPDATE",
        "SELECT id FROM jsworker.jobs FOR NO KEY UPDATE SKIP LOCKED",
        "SELECT id FROM jsworker.jobs FOR SHARE",
        "SELECT id FROM jsworker.jobs FOR KEY SHARE",
        "LOCK TABLE jsworker.jobs IN SHARE MODE",
        "LOCK TABLE jsworker.jobs IN ACCESS SHARE MODE",
        "UPDATE jsworker.jobs SET needs_publish = false, stream_seq = 1 WHERE status = 'queued'",
        f"{insert()} ON CONFLICT (id) DO UPDATE SET needs_publish = false",
        "SELECT payload FROM jsworker.jobs",
        "SELECT result FROM jsworker.jobs",
        "SELECT last_error FROM jsworker.jobs",
        "SELECT * FROM jsworker.job_events",
        "SELECT * FROM jsworker.workers",
        "SELECT data FROM jsworker.dead_messages",
        "SELECT * FROM jsworker.refused_rows",
        "UPDATE jsworker.jobs SET fencing_token = 0",
        "UPDATE jsworker.jobs SET worker_id = 'mine'",
        "UPDATE jsworker.jobs SET status = 'cancelled'",
        "UPDATE jsworker.jobs SET attempts = 0, errors = 0",
        "UPDATE jsworker.jobs SET payload = '{}'",
        "UPDATE jsworker.jobs SET dispatch = dispatch + 1",
        "DELETE FROM jsworker.jobs",
        "TRUNCATE jsworker.jobs",
        insert(fencing_token="7"),
        insert(worker_id="'mine'"),
        insert(attempts="1", errors="1"),
        insert(result="'1'"),
        "INSERT INTO jsworker.job_events (job_id, event) VALUES (gen_random_uuid(), 'claimed')",
        "UPDATE jsworker.installation SET id = gen_random_uuid()",
        "CREATE TABLE jsworker.extra (id int)",
        "SET ROLE jsworker_worker",
    ],
    "debouncer": [
        SCHEDULE,
        "SELECT payload FROM jsworker.jobs",
        "SELECT checkpoint FROM jsworker.jobs",
        "UPDATE jsworker.jobs SET status = 'cancelled'",
        "UPDATE jsworker.jobs SET fencing_token = 1",
        "UPDATE jsworker.jobs SET result = '{}'",
        "DELETE FROM jsworker.jobs",
        "SELECT result FROM jsworker.job_steps",
        "INSERT INTO jsworker.job_steps (job_id, name, fencing_token) VALUES (gen_random_uuid(), 'a', 1)",
    ],
    "publisher": [
        SCHEDULE,
        "UPDATE jsworker.jobs SET status = 'cancelled'",
        "UPDATE jsworker.jobs SET dispatch = dispatch + 1",
        "SELECT payload FROM jsworker.jobs",
        "DELETE FROM jsworker.jobs",
    ],
    "operator": [
        "DELETE FROM jsworker.jobs",
        "DELETE FROM jsworker.job_events",
        "DELETE FROM jsworker.audit",
        "UPDATE jsworker.audit SET actor = 'somebody else'",
        "UPDATE jsworker.workers SET state = 'stopped'",
        "UPDATE jsworker.statistics SET started = 0",
        "CREATE TABLE jsworker.extra (id int)",
        "SET ROLE jsworker_worker",
    ],
    "reader": [
        SCHEDULE,
        AUDIT,
        insert(),
        ENQUEUE,
        "UPDATE jsworker.jobs SET payload = '{}'",
        "DELETE FROM jsworker.jobs",
        "INSERT INTO jsworker.installation (id) VALUES (gen_random_uuid())",
        "SELECT id FROM jsworker.jobs FOR UPDATE",
        "CREATE TABLE jsworker.extra (id int)",
    ],
    "metrics": [
        SCHEDULE,
        ENQUEUE,
        *(
            f"SELECT {column} FROM jsworker.jobs"  # noqa: S608 -- constants
            for column in (
                "*",
                "payload",
                "result",
                "checkpoint",
                "last_error",
                "message",
                "unique_key",
                "id",
            )
        ),
        "SELECT hostname FROM jsworker.workers",
        "SELECT * FROM jsworker.job_events",
        "SELECT data FROM jsworker.dead_messages",
        "SELECT * FROM jsworker.refused_rows",
        "SELECT * FROM jsworker.installation",
        "UPDATE jsworker.jobs SET status = 'cancelled'",
        "SELECT status FROM jsworker.jobs FOR UPDATE",
        insert(),
    ],
}


@contextmanager
def rolled_back(url: str) -> Iterator[psycopg.Connection]:
    """Give a connection in whose transaction everything may be tried."""
    with psycopg.connect(url) as connection, connection.transaction(force_rollback=True):
        yield connection


def cases(what: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(role, statement) for role, statements in what.items() for statement in statements]


@pytest.mark.parametrize(("role", "statement"), cases(MAY))
def test_a_role_may_do_its_own(untouched: Guarded, role: str, statement: str) -> None:
    with rolled_back(untouched.url(role)) as connection:
        connection.execute(statement.encode())


@pytest.mark.parametrize(("role", "statement"), cases(MAY_NOT))
def test_a_role_is_refused_what_is_not_its_own(untouched: Guarded, role: str, statement: str) -> None:
    with (
        rolled_back(untouched.url(role)) as connection,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        connection.execute(statement.encode())


def test_a_producer_makes_nothing_but_jobs_that_wait(untouched: Guarded) -> None:
    for status in ("processing", "completed", "failed", "cancelled"):
        with rolled_back(untouched.url("producer")) as connection, pytest.raises(errors.CheckViolation):
            connection.execute(insert(status=f"'{status}'").encode())


def test_a_worker_deletes_no_job_that_lives(guarded: Guarded, sql: Sql) -> None:
    for status in ("scheduled", "queued", "processing"):
        job_id = insert_job(sql, status)
        with rolled_back(guarded.url("worker")) as connection, pytest.raises(errors.RestrictViolation):
            connection.execute("DELETE FROM jsworker.jobs WHERE id = %s", [job_id])


def test_nobody_else_gets_in(guarded: Guarded, servers: TestServers) -> None:
    stranger = f"stranger_{secrets.token_hex(4)}"
    with psycopg.connect(guarded.admin_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {stranger} LOGIN".encode())
    with (
        rolled_back(as_role(guarded.admin_url, stranger)) as connection,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        connection.execute("SELECT FROM jsworker.jobs")


def test_the_file_may_be_run_again_and_takes_back_what_was_given_too_much(guarded: Guarded) -> None:
    with psycopg.connect(guarded.admin_url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA jsworker TO jsworker_producer, PUBLIC")
        connection.execute(
            "GRANT ALL ON ALL TABLES IN SCHEMA jsworker"
            " TO jsworker_reader, jsworker_publisher, jsworker_metrics, jsworker_debouncer"
        )
    apply_roles(guarded.admin_url)
    apply_roles(guarded.admin_url)
    for role in ("producer", "publisher", "reader", "metrics", "debouncer"):
        with (
            rolled_back(guarded.url(role)) as connection,
            pytest.raises(errors.InsufficientPrivilege),
        ):
            connection.execute("DELETE FROM jsworker.jobs")


def test_what_somebody_made_before_is_handed_over(servers: TestServers) -> None:
    """By the superuser, without roles; the owner migrates it further."""
    url = servers.postgres.create_database(f"made_before_{secrets.token_hex(4)}")
    upgrade_database(url, OLDEST_REVISION)
    apply_roles(url)
    make_logins(url)
    upgrade_database(Guarded(url).url("owner"))
    with psycopg.connect(url) as connection:
        owners = connection.execute("""
            SELECT relowner::regrole::text FROM pg_class WHERE relnamespace = 'jsworker'::regnamespace
            UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'jsworker'::regnamespace
            UNION SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'jsworker'
        """).fetchall()
    assert owners == [("jsworker_owner",)]


@pytest.mark.parametrize("held", [_LOCK, "SELECT FROM jsworker.jobs"], ids=["a migration", "a reader"])
def test_the_file_waits_for_migrations_and_only_briefly_for_a_table(guarded: Guarded, held: str) -> None:
    """While it waits for a table, heartbeats wait for it."""
    with psycopg.connect(guarded.admin_url) as connection:
        connection.execute("ALTER TABLE jsworker.jobs OWNER TO CURRENT_USER")
    with psycopg.connect(guarded.admin_url) as holder:
        holder.execute(held.encode())
        with psycopg.connect(guarded.admin_url, autocommit=True) as connection:
            connection.execute("SET statement_timeout = '20s'")
            if held == _LOCK:
                connection.execute("SET lock_timeout = '100ms'")
            with pytest.raises(errors.LockNotAvailable):
                connection.execute(ROLES.read_bytes())


def test_tables_of_later_migrations_are_open_to_readers_and_workers_at_once(guarded: Guarded) -> None:
    with psycopg.connect(guarded.url("owner"), autocommit=True) as connection:
        connection.execute("CREATE TABLE jsworker.later (id int)")
    for role in ("worker", "reader"):
        with rolled_back(guarded.url(role)) as connection:
            connection.execute("SELECT * FROM jsworker.later")
    with rolled_back(guarded.url("worker")) as connection:
        connection.execute("INSERT INTO jsworker.later VALUES (1)")
    for role in ("producer", "metrics"):
        with rolled_back(guarded.url(role)) as connection, pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT * FROM jsworker.later")


def test_a_function_that_a_later_migration_makes_anew_stays_with_producers(guarded: Guarded) -> None:
    with psycopg.connect(guarded.url("owner"), autocommit=True) as connection:
        definition = connection.execute("SELECT pg_get_functiondef('jsworker.enqueue'::regproc)").fetchone()
        assert definition is not None
        connection.execute("DROP FUNCTION jsworker.enqueue")
        connection.execute(definition[0].encode())
    for role in ("worker", "producer", "publisher"):
        with rolled_back(guarded.url(role)) as connection:
            connection.execute(ENQUEUE.encode())
    for role in ("reader", "metrics"):
        with rolled_back(guarded.url(role)) as connection, pytest.raises(errors.InsufficientPrivilege):
            connection.execute(ENQUEUE.encode())


def test_a_databases_owner_who_is_no_superuser_can_run_the_file(servers: TestServers) -> None:
    """As on a managed server, whose roles nobody has made yet."""
    name = f"managed_{secrets.token_hex(4)}"
    url = servers.postgres.create_database(name)
    with psycopg.connect(url, autocommit=True) as connection:
        known = connection.execute("SELECT FROM pg_roles WHERE rolname = 'jsworker_owner'").fetchone()
        connection.execute(f"CREATE ROLE {name} LOGIN CREATEROLE".encode())
        connection.execute(f"ALTER DATABASE {name} OWNER TO {name}".encode())
        if known is not None:  # made by another test's superuser
            for role in ("owner", "worker", "producer", "publisher", "reader", "metrics", "debouncer"):
                connection.execute(f"GRANT jsworker_{role} TO {name} WITH ADMIN OPTION".encode())
    own = as_role(url, name)
    upgrade_database(own)
    apply_roles(own)
    with psycopg.connect(url) as connection:
        [row] = connection.execute("SELECT relowner::regrole::text FROM pg_class WHERE relname = 'jobs'")
    assert row == ("jsworker_owner",)


STORES = [
    "CREATE TEMPORARY TABLE mine (id int)",
    "SELECT lo_create(0)",
    "SELECT lo_creat(-1)",
    "SELECT lo_from_bytea(0, 'kept')",
]


def test_in_a_database_of_its_own_nobody_keeps_anything_but_jobs(servers: TestServers) -> None:
    url = servers.postgres.create_database(f"own_{secrets.token_hex(4)}")
    guarded = guard(url)
    statements = [(role, each) for role in LOGINS for each in STORES]
    for role, statement in statements:
        with rolled_back(guarded.url(role)) as connection:
            connection.execute(statement.encode())
    for _ in range(2):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(OWN_DATABASE.read_bytes())
    for role, statement in statements:
        with (
            rolled_back(guarded.url(role)) as connection,
            pytest.raises(errors.InsufficientPrivilege),
        ):
            connection.execute(statement.encode())
    stranger = f"stranger_{secrets.token_hex(4)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {stranger} LOGIN".encode())
    with pytest.raises(psycopg.OperationalError, match="does not have CONNECT privilege"):
        psycopg.connect(as_role(url, stranger))
    with psycopg.connect(guarded.url("owner")) as connection:
        connection.execute("DROP SCHEMA jsworker CASCADE")
    upgrade_database(guarded.url("owner"))


class TestThroughTheCode:
    """The statements of this version, role by role."""

    async def test_doctor_finds_that_a_worker_has_its_rights(self, guarded: Guarded) -> None:
        async with opened(guarded.url("worker")) as database:
            assert await read_missing_rights(database) == []

    async def test_doctor_counts_the_connections_of_other_roles(self, guarded: Guarded) -> None:
        with ExitStack() as others:
            for _ in range(5):
                others.enter_context(psycopg.connect(guarded.url("reader")))
            async with opened(guarded.url("worker")) as database:
                assert (await read_server(database)).connections >= 6

    async def test_a_reader_lists_jobs_workers_and_timelines(self, guarded: Guarded, sql: Sql) -> None:
        job_id = insert_job(sql)
        async with opened(guarded.url("reader")) as database:
            await database.check_usable()
            assert [row["id"] for row in (await listing.list_jobs(database)).jobs] == [job_id]
            assert await listing.get_job(database, job_id)
            assert await listing.timeline(database, job_id) == []
            assert await workers.list_workers(database, limit=10) == []
            assert (await database.run(DEAD_MESSAGES))[0].messages == 0
            with pytest.raises(DatabaseRefused, match="permission denied for table jobs"):
                await control.cancel(database, [job_id])

    async def test_a_worker_role_prunes(self, guarded: Guarded, sql: Sql) -> None:
        insert_job(sql, "completed")
        async with opened(guarded.url("worker")) as database:
            ended = prune.Ended(await prune.cutoff(database, older_than=-60.0))
            assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 1

    async def test_an_operator_with_the_wrong_role_is_told_in_one_line(self, guarded: Guarded) -> None:
        async with opened(guarded.url("producer")) as database:
            with pytest.raises(
                DatabaseRefused, match=r"permission denied for table jobs \(SQLSTATE 42501\)$"
            ):
                await listing.list_jobs(database)

    def test_only_the_owner_migrates(self, servers: TestServers, guarded: Guarded) -> None:
        empty = servers.postgres.create_database(f"empty_{secrets.token_hex(4)}")
        for role in ("worker", "producer", "reader"):
            with pytest.raises(DatabaseRefused, match="permission denied for database"):
                upgrade_database(as_role(empty, LOGINS[role]))
        assert current_revision(guarded.url("reader")) is not None


@pytest.mark.parametrize(
    ("role", "terms"),
    [
        ("producer", JobTerms(expires_in=60.0)),
        ("producer", JobTerms(scope="waiting")),
        ("producer", JobTerms(scope="window", unique_for=60.0)),
        ("debouncer", JobTerms(scope="debounce", debounce=5.0, debounce_max=60.0)),
    ],
)
async def test_who_enqueues_by_terms_needs_no_more(guarded: Guarded, role: str, terms: JobTerms) -> None:
    async with opened(guarded.url(role)) as database:
        for created in (True, False):
            job = NewJob(new_job_id(), "{}", "a", terms=terms)
            answer = await enqueue_one(database, f"{role}-{terms.scope}", job, publish_after=0.0)
            assert answer.created is created


@pytest.mark.parametrize(
    ("role", "option"),
    [
        ("producer", "expires_in => '1 minute'"),
        ("producer", "unique_scope => 'waiting'"),
        ("producer", "unique_for => '1 minute'"),
        ("debouncer", "debounce => '5 seconds', debounce_max => '1 minute'"),
        ("debouncer", "debounce => '5 seconds'"),
    ],
)
def test_who_calls_the_function_needs_no_more(guarded: Guarded, role: str, option: str) -> None:
    with psycopg.connect(guarded.url(role)) as connection:
        kind = f"called-{secrets.token_hex(4)}"
        call = f"SELECT created FROM jsworker.enqueue('{kind}', unique_key => 'a', {option})"  # noqa: S608 -- words of this file
        assert [connection.execute(call.encode()).fetchone() for _ in range(2)] == [(True,), (False,)]


async def test_who_may_not_cancel_what_has_expired_is_told(guarded: Guarded) -> None:
    kind, job = "expired", NewJob(new_job_id(), "{}", "a", terms=JobTerms(expires_in=60.0))
    async with opened(guarded.url("producer")) as producer, opened(guarded.url("worker")) as worker:
        assert (await enqueue_one(producer, kind, job, publish_after=0.0)).created
        over = text("UPDATE jsworker.jobs SET expires_at = clock_timestamp() WHERE kind = :kind")
        await worker.run(over, {"kind": kind})
        for call in (
            enqueue_one(producer, kind, job._replace(id=new_job_id()), publish_after=0.0),
            enqueue_many(producer, kind, [job._replace(id=new_job_id())]),
        ):
            with pytest.raises(TransitionRefused, match=f"held by job {job.id}, which has expired"):
                await call
        function = text("SELECT created FROM jsworker.enqueue(:kind, unique_key => 'a')")
        with pytest.raises(DatabaseRefused, match="55006"):
            await producer.run(function, {"kind": kind})
        [row] = await worker.run(function, {"kind": kind})
        assert row.created


async def test_a_producer_debounces_nothing(guarded: Guarded) -> None:
    job = NewJob(new_job_id(), "{}", "a", terms=JobTerms(scope="debounce", debounce=5.0))
    async with opened(guarded.url("producer")) as database:
        with pytest.raises(DatabaseRefused, match="permission denied"):
            await enqueue_one(database, "echo", job, publish_after=0.0)
        with pytest.raises(DatabaseRefused, match="42501"):
            await database.run(
                text("SELECT * FROM jsworker.enqueue('b', unique_key => 'a', debounce => '1 s')")
            )
