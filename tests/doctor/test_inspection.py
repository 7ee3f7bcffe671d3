"""Reading the facts: through a pooler, from a full table without reading it whole, and only reading."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest
from nats.js.api import ConsumerConfig
from sqlalchemy import Connection, TextClause, create_engine, text
from sqlalchemy.engine import make_url

from jsworker import JobClient
from jsworker.core.errors import StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.doctor import job_checks, nats_checks
from jsworker.doctor.checks import examine
from jsworker.doctor.finding import Finding
from jsworker.doctor.gather import Unknown, gather
from jsworker.ownership.database import Database
from jsworker.ownership.queries import job_report, server_report
from jsworker.ownership.transitions import republish, schedules, workers
from jsworker.stream import api
from jsworker.stream.diagnostics import Inspector
from jsworker.stream.jetstream import Stream, ensured_stream
from tests.ownership.test_plans import access_paths, rows_read
from tests.ownership.test_pool import pooled
from tests.stream.nats_server import NatsServer
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.support.servers import TEMPLATE, TestServers, copy_database

FEW = 1_000
QUEUED = 30_000
KEYS = 5_000
ENDED = 60_000

TABLES = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, publish_after, queued_at, needs_publish)
SELECT uuidv7(), 'kind-' || n %% 3, '{}', 'queued', 1, now() - interval '1 hour',
  now() - n * interval '1 ms', n <= %(few)s FROM generate_series(1, %(queued)s) AS n;

INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)
SELECT uuidv7(), 'later', '{}', 'scheduled', now() - interval '1 hour' FROM generate_series(1, %(few)s);

INSERT INTO jsworker.jobs (
  id, kind, payload, status, worker_id, fencing_token, attempts, claimed_at, last_activity_at, stale_after,
  dispatch)
SELECT uuidv7(), 'running', '{}', 'processing', 'worker-' || n %% 5, 1, 1, now(), now() - interval '1 hour',
  '30 s', 1
FROM generate_series(1, %(few)s) AS n;

INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), 'done', '{}', 'completed', 1, 1, now() - n * interval '1 ms', 1
FROM generate_series(1, %(ended)s) AS n;

INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, held_by, held_at, limit_key)
SELECT uuidv7(), 'limited', '{}', 'scheduled', 1, now(), 'limit', now() - interval '1 hour',
  CASE WHEN n > %(keys)s THEN 'busy' ELSE 'key-' || lpad(n::text, 5, '0') END
FROM generate_series(1, %(keys)s + 2 * %(few)s) AS n;

INSERT INTO jsworker.limits (kind, key, max_running, set_by) VALUES ('limited', '', 1, 'code');
INSERT INTO jsworker.limits (kind, key, paused_at) VALUES ('limited', 'paused', now());
INSERT INTO jsworker.limits (kind, key) SELECT 'limited', 'used-' || n FROM generate_series(1, %(keys)s) AS n;

INSERT INTO jsworker.job_events (job_id, event) SELECT id, 'released' FROM jsworker.jobs;

INSERT INTO jsworker.workers (
  id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)
SELECT 'worker-' || n, 'h', 1, '{running}', 10, '1', '5 s', 'running', now() - interval '2 days'
FROM generate_series(1, 50) AS n;
"""

LATE = {"older_than": 30.0}
OF_JOBS: dict[str, tuple[TextClause, dict[str, Any], set[str]]] = {
    "unpublished": (job_report.UNPUBLISHED, LATE, {"jobs_to_publish"}),
    "overdue": (job_report.OVERDUE, LATE, {"jobs_due"}),
    "queued": (job_report.QUEUED, {"served": ["kind-0"]}, {"jobs_queued_in_order"}),
    "silent owners": (job_report.SILENT_OWNERS, {}, {"jobs_owned"}),
    "ended": (job_report.ENDED, {}, {"jobs_finished"}),
    "limits": (job_report.LIMITS, {"after_kind": "", "after_key": ""}, {"jobs_held_by_key", "jobs_slots"}),
}


@pytest.fixture(scope="module")
def full_url(servers: TestServers) -> str:
    url = copy_database(servers.postgres, "full", TEMPLATE)
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for each in ("jobs", "job_events"):
            connection.execute(f"ALTER TABLE jsworker.{each} SET (autovacuum_enabled = off)".encode())
        connection.execute(TABLES, {"few": FEW, "queued": QUEUED, "ended": ENDED, "keys": KEYS})
    return url


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def table(request: pytest.FixtureRequest, servers: TestServers, full_url: str) -> Iterator[Connection]:
    """A connection to full tables; it explains and writes nothing."""
    url = full_url
    if request.param == "after ANALYZE":
        url = copy_database(servers.postgres, "full_analyzed", "full")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ANALYZE")
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.connect() as opened:
        yield opened
    engine.dispose()


class TestFullTables:
    @pytest.mark.parametrize("name", OF_JOBS)
    def test_jobs_are_found_by_index(self, name: str, table: Connection) -> None:
        statement, parameters, wanted = OF_JOBS[name]
        paths = access_paths(table, statement, parameters)
        small = ("workers", "job_events", "refused_rows", "limits")
        found = {path for path in paths if not any(table in path for table in small)}
        assert found == wanted
        assert "Seq Scan on job_events" not in paths

    @pytest.mark.parametrize("name", sorted(OF_JOBS))
    def test_a_bounded_number_of_rows_is_looked_at(self, name: str, table: Connection) -> None:
        statement, parameters, _ = OF_JOBS[name]
        # A plan may mark all of a kind's entries of the index before it reads the first thousand of the rows.
        marked = QUEUED if name == "queued" else 0
        assert rows_read(table, statement, parameters) <= marked + 5 * job_report.BOUND

    async def test_what_they_show(self, table: Connection, settings: Settings) -> None:
        url = table.engine.url.render_as_string(hide_password=False)
        facts = await gather(settings.model_copy(update={"database_url": url}))
        for late in (facts.unpublished, facts.overdue):
            assert not isinstance(late, Unknown)
            assert late.jobs == FEW
        assert not isinstance(facts.queues, Unknown)
        assert [(queue.kind, queue.jobs) for queue in facts.queues] == [
            *(("kind-0", job_report.BOUND), ("kind-1", job_report.BOUND), ("kind-2", job_report.BOUND))
        ]
        assert not isinstance(facts.silent_owners, Unknown)
        assert {owner.worker_id: (owner.jobs, owner.registered) for owner in facts.silent_owners} == {
            "worker-0": (200, False),
            **{f"worker-{n}": (200, True) for n in range(1, 5)},
        }
        assert not isinstance(facts.ended, Unknown)
        assert (facts.ended.jobs, facts.ended.failed) == (1000, 0)
        assert not isinstance(facts.limits, Unknown)
        assert len(facts.limits) == job_report.MOST_HELD_KEYS + 1
        assert {(limit.key, limit.held) for limit in facts.limits if limit.kind == "limited"} == {
            *(("busy", job_report.BOUND), ("paused", 0)),
            *((f"key-{n:05}", 1) for n in range(1, job_report.MOST_HELD_KEYS)),
        }


def test_no_statement_writes() -> None:
    writing = re.compile(
        r"\b(insert|update|delete|truncate|alter|create|drop|grant|set|lock|for share)\b", re.IGNORECASE
    )
    statements = {
        f"{module.__name__}.{name}": statement.text
        for module in (job_report, server_report)
        for name, statement in vars(module).items()
        if isinstance(statement, TextClause)
    }
    assert len(statements) >= 13
    assert [name for name, text in statements.items() if writing.search(text)] == []


async def test_a_direct_connection(settings: Settings) -> None:
    facts = await gather(settings)
    assert not isinstance(facts.link, Unknown)
    assert (facts.link.sharing, facts.link.local, facts.link.encrypted) == ("direct", True, False)


async def test_a_pooler_is_noticed(settings: Settings, database_url: str) -> None:
    async with pooled(database_url) as (_, url):
        facts = await gather(settings.model_copy(update={"database_url": url}))
    assert not isinstance(facts.link, Unknown)
    assert facts.link.sharing == "unclear"  # this one lends a session to each client


async def test_a_question_without_an_answer_hides_no_other(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.doctor.gather._STATEMENT_SECONDS", 1.0)
    with psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE jsworker.limits, jsworker.batches IN ACCESS EXCLUSIVE MODE")
        facts = await gather(settings)
    answers = {each.name: getattr(facts, each.name) for each in fields(facts)}
    unknown = {name for name, answer in answers.items() if isinstance(answer, Unknown) and answer.failed}
    assert unknown == {"limits", "left_batches"}
    found = [each for each in examine(facts) if not each.check.startswith("nats.")]  # there is no stream
    unchecked = {each.check: each for each in found if "not checked" in each.says}
    assert unchecked.keys() == {"jobs.limits", "jobs.workflows"}
    assert all(each.says.endswith("did not answer within 1 s") for each in unchecked.values())
    assert {each.level for each in unchecked.values()} == {"warning"}


async def test_a_reader_for_whom_others_wait_is_named(database: Database, database_url: str) -> None:
    """As when ALTER TABLE waits for a backup, and everybody else waits for ALTER TABLE."""
    with psycopg.connect(database_url) as reader, psycopg.connect(database_url) as other:
        pid = reader.info.backend_pid
        reader.execute("CREATE TABLE own AS SELECT 1 AS n")
        reader.commit()
        reader.execute("SELECT FROM jsworker.jobs")
        reader.execute("LOCK TABLE own")
        for statement, named in (
            ("LOCK TABLE own", []),
            ("ALTER TABLE jsworker.jobs OWNER TO CURRENT_USER", [(pid, ["jobs"], 1)]),
        ):
            waits = asyncio.create_task(asyncio.to_thread(other.execute, statement))
            try:
                await eventually(lambda: is_waited_for(database, pid))
                found = await server_report.read_holders(database)
                assert [(one.pid, one.tables, one.waiting) for one in found] == named
            finally:
                other.cancel_safe()
                with pytest.raises(psycopg.errors.QueryCanceled):
                    await waits
                other.rollback()
        reader.rollback()


async def is_waited_for(database: Database, pid: int) -> None:
    rows = await database.run(
        text("SELECT w.pid FROM pg_locks AS w WHERE NOT w.granted AND :pid = ANY (pg_blocking_pids(w.pid))"),
        {"pid": pid},
    )
    assert rows


HELD = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, held_by, held_at, limit_key)
VALUES (uuidv7(), %s, '{}', 'scheduled', 1, now(), 'limit', now() - interval '1 hour', %s)
"""
OF_KINDS = """
INSERT INTO jsworker.limits (kind, key, max_running, set_by)
VALUES ('full', '', 1, 'code'), ('free', '', 2, 'code'), ('own', '', 1, 'code'),
  ('own', 'acme', 3, 'operator');
INSERT INTO jsworker.limits (kind, key, paused_at, paused_by) VALUES ('paused', '', now(), 'ann');
INSERT INTO jsworker.jobs (
  id, kind, payload, status, worker_id, fencing_token, attempts, claimed_at, last_activity_at, dispatch,
  limit_key)
SELECT uuidv7(), kind, '{}', 'processing', 'worker-1', 1, 1, now(), now(), 1, 'acme'
FROM unnest(ARRAY['full', 'own']) AS kind;
"""


async def test_held_keys_without_a_row_of_their_own_have_what_their_kind_has(
    settings: Settings, database_url: str
) -> None:
    hostile = "k\u00a0\u202e\U0001f600'; DROP TABLE jobs; --"
    keys = [
        *((kind, "acme") for kind in ("full", "free", "own", "paused", "forgotten")),
        ("hostile", hostile),
    ]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(OF_KINDS)
        for kind, key in [*keys, ("keyless", None)]:
            connection.execute(HELD, [kind, key])
    facts = await gather(settings)
    assert not isinstance(facts.limits, Unknown)
    found = {(limit.kind, limit.key): limit for limit in facts.limits}
    assert {key: limit.free for key, limit in found.items()} == {
        ("full", "acme"): 0,
        ("free", "acme"): 2,
        ("own", "acme"): 2,
        ("paused", "acme"): 0,
        ("paused", ""): 0,
        ("forgotten", "acme"): 1_000_000,
        ("hostile", hostile): 1_000_000,
    }
    assert found["paused", ""].paused_by == "ann"
    assert found["paused", "acme"].paused_for is None
    warned = [each.says for each in job_checks.limits(facts.limits) if each.level == "warning"]
    for words in ("'acme' of kind free", "'acme' of kind forgotten", "of kind hostile"):
        assert sum(words in says for says in warned) == 1, words
    assert not any(f"of kind {kind}" in says for kind in ("full", "paused") for says in warned)


async def test_every_schedule_is_looked_at(settings: Settings, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jsworker.schedules (name, kind, payload, rule, tz, missed, overlap, next_at, set_by)"
            " SELECT 's' || n, CASE WHEN n = 1200 THEN 'last' ELSE 'many' END, '{}', 'every 3600 s', 'UTC',"
            " 'skip', 'allow', clock_timestamp() + make_interval(secs => 3600 * n - 7000), 'operator'"
            " FROM generate_series(1, 1200) AS n"
        )
    facts = await gather(settings)
    assert not isinstance(facts.schedules, Unknown)
    found = {each.kind: (each.next, each.schedules, each.late) for each in facts.schedules}
    assert found == {"many": ("s1", 1199, 1), "last": ("s1200", 1, 0)}
    late, unserved = [each.says for each in job_checks.schedules(facts.schedules, ())]
    assert late.startswith("schedule s1 of kind many has been due for ")
    assert unserved == "schedule s1200 enqueues jobs of kind last, which no worker claims"


async def test_a_schedule_that_fired_while_the_clock_was_ahead_is_named_until_it_is_resumed(
    settings: Settings, database: Database, database_url: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jsworker.schedules"
            " (name, kind, payload, rule, tz, missed, overlap, next_at, last_at, set_by)"
            " SELECT name, 'reports', '{}', 'every 60 s', 'UTC', 'coalesce', 'allow',"
            " clock_timestamp() + ahead + interval '1 min', clock_timestamp() + ahead, 'operator'"
            " FROM (VALUES ('well', interval '0'), ('day ahead', interval '1 d')) AS of(name, ahead)"
        )

    alive = job_report.RegisteredWorker("alpha", ("reports",), 10, "1.0", "running", alive=True)

    async def found() -> list[str]:
        facts = await gather(settings)
        assert not isinstance(facts.schedules, Unknown)
        findings = job_checks.schedules(facts.schedules, (alive,))
        return [f"{each.says} -> {each.do}" for each in findings]

    [says] = await found()
    assert says.startswith(
        "schedule day ahead of kind reports enqueues nothing for 24 h, which had their jobs "
    )
    assert says.endswith("`jsworker schedules resume 'day ahead'`: it goes on from the present.")
    await schedules.pause(database, "day ahead")
    await schedules.resume(database, "day ahead")
    assert await found() == []


async def test_servers_that_fall_silent_are_findings_and_no_endless_wait(
    settings: Settings, database_url: str
) -> None:
    async with proxied(database_url) as (postgres, url), proxied(settings.nats_url) as (nats, nats_url):
        postgres.black_hole()
        nats.black_hole()
        changed = {"database_url": url, "nats_url": nats_url}
        async with asyncio.timeout(40):
            facts = await gather(settings.model_copy(update=changed))
    assert isinstance(facts.server, Unknown)
    assert "PostgreSQL at 127.0.0.1" in facts.server.because
    assert isinstance(facts.nats, Unknown)
    assert "did not answer" in facts.nats.because


async def test_a_login_that_receives_no_answers_is_told_what_it_lacks(
    settings: Settings, database_url: str, tmp_path: Path
) -> None:
    may = 'permissions: { subscribe: { deny: "_INBOX.>" } }'
    server = NatsServer(tmp_path, extra=f"authorization {{ users: [ {{ user: a, password: b, {may} }} ] }}")
    await server.start()
    with psycopg.connect(database_url) as postgres:
        postgres.execute(WORKER, [["resize"]])  # is asked first
    try:
        findings = examine(
            await gather(settings.model_copy(update={"nats_url": f"nats://a:b@{server.url[7:]}"}))
        )
    finally:
        await server.stop()
    found = next(each for each in findings if each.check == "nats.stream")
    assert found.says.startswith("this login lacks a permission: ")
    assert 'permissions violation for subscription to "_inbox.' in found.says
    assert found.do is not None
    assert found.do.startswith(
        "Add JSWORKER_NATS_INBOX_PREFIX, followed by .>, to the subscribe permissions of the login"
    )


KINDS = [f"kind-{number:03}" for number in range(300)]
PAGE = 256
WRONG_ACK_WAIT = 0.5

WORKER = """
INSERT INTO jsworker.workers (
  id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)
VALUES ('worker-1', 'h', 1, %s, 10, '1', '5 s', 'running', now())
"""


@pytest.fixture
async def many_consumers(settings: Settings, database_url: str) -> AsyncIterator[None]:
    """More consumers than a server lists at once, the last of them wrong and without a worker."""
    stream = Stream(settings, installation_id=None, events=Events(), client_name="test")
    await stream.connect()
    await stream.ensure(KINDS)
    await stream.close()
    client = await nats.connect(settings.nats_url)
    config = (await client.jetstream().consumer_info(settings.stream, KINDS[-1])).config
    changed = ConsumerConfig(**(config.__dict__ | {"ack_wait": WRONG_ACK_WAIT}))
    await client.jetstream().add_consumer(settings.stream, changed)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(WORKER, [KINDS[:-1]])
    yield
    await client.jetstream().delete_stream(settings.stream)  # else the server's stop takes seconds for them
    await client.close()


async def found_of_stream(settings: Settings) -> dict[str, list[Finding]]:
    """What is found of consumers, without what is well."""
    findings = examine(await gather(settings))
    return {
        check: [each for each in findings if each.check == check and each.level != "ok"]
        for check in ("nats.consumers", "nats.service")
    }


@pytest.mark.usefixtures("many_consumers")
class TestManyConsumers:
    async def test_those_of_every_page_are_looked_at(self, settings: Settings) -> None:
        facts = await gather(settings)
        assert not isinstance(facts.consumers, Unknown)
        assert sorted(report.name for report in facts.consumers) == KINDS
        found = await found_of_stream(settings)
        [wrong] = found["nats.consumers"]
        assert wrong.level == "error"
        assert f"consumer {KINDS[-1]} has ack_wait={WRONG_ACK_WAIT:g} s" in wrong.says
        [idle] = found["nats.service"]
        assert idle.says == f"no message is in 1 consumer without a live worker: {KINDS[-1]}"

    async def test_too_many_are_not_all_looked_at_and_it_is_told(
        self, settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api, "MOST_CONSUMERS", PAGE)
        monkeypatch.setattr(nats_checks, "MOST_CONSUMERS", PAGE)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("UPDATE jsworker.workers SET kinds = %s", [[*KINDS[:PAGE], KINDS[-2]]])
        found = await found_of_stream(settings)
        [remark] = found["nats.consumers"]
        assert remark.level == "info"
        assert remark.says == f"no more than {PAGE + 1} consumers were looked at; there may be others"
        assert found["nats.service"] == []  # the consumer of a worker is asked for by name

    async def test_a_list_that_takes_too_long_is_given_up(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api, "_LIST_SECONDS", 1.0)
        async with proxied(settings.nats_url) as (proxy, url):
            inspector = Inspector(settings.model_copy(update={"nats_url": url}))
            await inspector.connect(5.0)
            try:
                proxy.slow_down(0.25)  # each way, and there are three pages
                with pytest.raises(StreamUnavailable, match="not listed within 1 s"):
                    await inspector.consumers([])
            finally:
                proxy.restore()
                await inspector.close()


async def test_a_database_whose_messages_go_to_two_streams(
    settings: Settings,
    make_settings: Callable[..., Settings],
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(republish, "_CHANGE", timedelta())
    installation_id = await workers.installation_id(database)
    other = make_settings(
        stream=f"{settings.stream}_OTHER", subject_prefix=f"{settings.subject_prefix}-other"
    )
    for each in (settings, other):
        async with ensured_stream(each, installation_id, events=Events(), client_name="test"):
            pass

    async def pairing() -> Finding:
        findings = examine(await gather(settings))
        return next(each for each in findings if each.check == "nats.pairing")

    assert (await pairing()).level == "ok"
    async with JobClient(other) as client:
        await client.enqueue("elsewhere", {})

    async def is_found() -> None:  # once the client has marked its job as published
        found = await pairing()
        assert found.level == "warning"
        assert found.says == (
            f"messages of 1 queued job (elsewhere) went to another stream than this {settings.stream}: "
            "such jobs start late, from the table"
        )

    await eventually(is_found)


async def test_a_stream_that_answers_for_workers_is_found(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    client = await nats.connect(server.url)
    settings = make_settings(nats_url=server.url)

    async def look() -> Finding:
        return next(each for each in examine(await gather(settings)) if each.check == "nats.liveness")

    try:
        assert (await look()).level == "ok"
        await client.jetstream().add_stream(name="ARCHIVE", subjects=["jsworker.>"])
        assert (await look()).level == "error"
    finally:
        await client.close()
        await server.stop()
