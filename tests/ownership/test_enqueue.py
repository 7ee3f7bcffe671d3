"""ENQUEUE: a job is a row first, in its producer's transaction; one live job holds a unique key."""

import asyncio
import json
import multiprocessing
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from typing import Any
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Engine, TextClause
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jsworker.core import strict_json
from jsworker.core.errors import DatabaseTimeout, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.enqueue import (
    Enqueued,
    NewJob,
    enqueue,
    enqueue_many,
    new_job_id,
)
from jsworker.ownership.transitions.enqueue_terms import statement_for
from tests.support.polling import eventually as eventually_done
from tests.support.proxy import proxied

from .calls import opened
from .polling import answered, eventually
from .rows import KIND, Sql, age, insert_job, read_events, read_job, read_value, waits

MANY = 10_000


def jobs(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


def seconds_ahead(sql: Sql, job_id: UUID, column: str) -> float:
    query = psycopg.sql.SQL(
        "SELECT extract(epoch FROM {} - clock_timestamp()) AS ahead FROM jsworker.jobs WHERE id = %s"
    )
    row = sql.execute(query.format(psycopg.sql.Identifier(column)), [job_id]).fetchone()
    assert row is not None
    return float(row["ahead"])


class TestOne:
    async def test_a_job_that_is_due(self, database: Database, sql: Sql) -> None:
        new = NewJob(new_job_id(), '{"path": "é"}', "k-1", 0.0, 2, 4, "00-aa", "vendor=1")
        answer = await enqueue(database, KIND, new, publish_after=300.0)
        assert answer == Enqueued(new.id, created=True)
        job = read_job(sql, new.id)
        assert (job["status"], job["dispatch"], job["needs_publish"]) == ("queued", 1, True)
        assert (job["kind"], job["payload"], job["unique_key"]) == (KIND, {"path": "é"}, "k-1")
        assert (job["max_attempts"], job["max_stalls"]) == (2, 4)
        assert (job["traceparent"], job["tracestate"]) == ("00-aa", "vendor=1")
        assert (job["fencing_token"], job["attempts"], job["worker_id"]) == (0, 0, None)
        assert 200 < seconds_ahead(sql, new.id, "publish_after") <= 300
        assert seconds_ahead(sql, new.id, "queued_at") <= 0
        assert read_events(sql, new.id) == []

    async def test_a_delayed_job(self, database: Database, sql: Sql) -> None:
        new = NewJob(new_job_id(), "{}", delay=60.0)
        await enqueue(database, KIND, new, publish_after=5.0)
        job = read_job(sql, new.id)
        assert (job["status"], job["dispatch"], job["needs_publish"]) == ("scheduled", 0, False)
        assert (job["publish_after"], job["queued_at"]) == (None, None)
        assert 50 < seconds_ahead(sql, new.id, "run_at") <= 60

    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
    async def test_a_live_job_holds_the_key(self, database: Database, sql: Sql, status: str) -> None:
        holder = insert_job(sql, status, unique_key="k-1")
        before = read_job(sql, holder)
        answer = await enqueue(
            database, KIND, NewJob(new_job_id(), '{"new": 1}', unique_key="k-1"), publish_after=0.0
        )
        assert answer == Enqueued(holder, created=False)
        assert read_job(sql, holder) == before
        assert jobs(sql) == 1

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
    async def test_a_final_job_does_not(self, database: Database, sql: Sql, status: str) -> None:
        insert_job(sql, status, unique_key="k-1")
        answer = await enqueue(
            database, KIND, NewJob(new_job_id(), "{}", unique_key="k-1"), publish_after=0.0
        )
        assert answer.created

    async def test_a_key_belongs_to_its_kind(self, database: Database, sql: Sql) -> None:
        insert_job(sql, unique_key="k-1", kind="other-kind")
        assert (
            await enqueue(database, KIND, NewJob(new_job_id(), "{}", unique_key="k-1"), publish_after=0.0)
        ).created

    async def test_twins_at_once_create_one_job(self, database: Database, sql: Sql) -> None:
        answers = await asyncio.gather(
            *(
                enqueue(database, KIND, NewJob(new_job_id(), "{}", unique_key="k-1"), publish_after=0.0)
                for _ in range(10)
            )
        )
        assert sum(answer.created for answer in answers) == 1
        assert len({answer.id for answer in answers}) == 1
        assert jobs(sql) == 1

    @pytest.mark.usefixtures("vanishing")
    async def test_a_key_that_is_taken_and_freed_too_fast(self, database: Database, sql: Sql) -> None:
        new = NewJob(new_job_id(), "{}", unique_key="vanishing")
        refused = r"^unique key 'vanishing' of kind count-lines is taken and freed too fast; try again$"
        with pytest.raises(TransitionRefused, match=refused):
            await enqueue(database, KIND, new, publish_after=0.0)
        assert read_value(sql, "SELECT last_value FROM tries") == 3
        with pytest.raises(TransitionRefused, match=refused):
            await enqueue_many(database, KIND, [NewJob(new_job_id(), "{}"), new])
        assert read_value(sql, "SELECT last_value FROM tries") == 6


def test_forked_producers_draw_different_ids() -> None:
    new_job_id()  # by now the process has a random state, which its forks inherit
    fork = multiprocessing.get_context("fork")

    def draw(answers: Connection) -> None:
        tails = []
        for _ in range(50):
            time.sleep(0.002)  # in a millisecond of its own: what follows the time is random as a whole
            tails.append(new_job_id().hex[16:])
        answers.send(tails)

    drawn: list[str] = []
    for _ in range(2):
        answers, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=draw, args=[theirs])
        child.start()
        drawn += answers.recv()
        child.join()
    assert len(drawn) == len(set(drawn)) == 100


@pytest.fixture
def vanishing(sql: Sql) -> Iterator[None]:
    """A key whose job is never inserted and never found, as if a twin came and went each time."""
    sql.execute("CREATE SEQUENCE tries")
    sql.execute(
        """
        CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM nextval('tries'); RETURN NULL; END $$
        """
    )
    sql.execute(
        """
        CREATE TRIGGER vanish BEFORE INSERT ON jsworker.jobs FOR EACH ROW
        WHEN (NEW.unique_key = 'vanishing') EXECUTE FUNCTION vanish()
        """
    )
    yield
    sql.execute("DROP FUNCTION vanish() CASCADE")
    sql.execute("DROP SEQUENCE tries")


class TestSlowLine:
    """A statement of many bytes has time for them, also where they take longer than is expected."""

    async def test_it_gets_more_time_until_the_line_is_fast_again(self, database_url: str) -> None:
        text = json.dumps(secrets.token_hex(250_000))
        async with (
            proxied(database_url) as (proxy, url),
            opened(url, statement_timeout=1.0) as database,
        ):

            async def one() -> Enqueued:
                return await enqueue(database, KIND, NewJob(new_job_id(), text, None), publish_after=300.0)

            await answered(database.ping)
            near = database.seconds_for(len(text))
            proxy.slow_down(0.06, dribble_bytes=16_384)  # a job takes two seconds
            too_slow = r"within 1\.5 s to a statement of 500002 bytes, for which the line may be too slow$"
            with pytest.raises(DatabaseTimeout, match=too_slow):
                await one()
            assert (await answered(one)).created
            assert database.seconds_for(len(text)) > near
            proxy.restore()

            async def as_before() -> None:
                await answered(one)
                assert database.seconds_for(len(text)) == near

            await eventually_done(as_before)

    async def test_a_silent_server_holds_nobody_for_minutes(self, database_url: str) -> None:
        new = NewJob(new_job_id(), json.dumps(secrets.token_hex(33_000)), None)
        async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=0.1) as database:
            await answered(database.ping)
            proxy.black_hole()
            for _ in range(6):
                with pytest.raises(DatabaseTimeout):
                    await enqueue(database, KIND, new, publish_after=300.0)
            assert database.seconds_for(1_000_000) == pytest.approx(16.1)

    async def test_two_statements_at_once_are_one_sign(self, database_url: str) -> None:
        new = [NewJob(new_job_id(), json.dumps(secrets.token_hex(33_000)), None) for _ in range(3)]
        async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=0.1) as database:
            proxy.black_hole()
            tries = [enqueue(database, KIND, each, publish_after=300.0) for each in new]
            ended = await asyncio.gather(*tries, return_exceptions=True)
            assert [type(each) for each in ended] == [DatabaseTimeout] * 3
            assert database.seconds_for(1_000_000) == pytest.approx(2.1)


class TestMany:
    async def test_rows_take_time_beside_their_payloads(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[int] = []
        run = database.run

        async def noted(*given: Any, size: int = 0, **how: Any) -> Any:
            sizes.append(size)
            return await run(*given, size=size, **how)

        monkeypatch.setattr(database, "run", noted)
        new = [NewJob(new_job_id(), "{}", f"key-{place}") for place in range(5000)]
        assert all(answer.created for answer in await enqueue_many(database, KIND, new))
        assert sizes == [5000 * (2 + 200)]

    async def test_ten_thousand_with_twins_inside_and_outside(self, database: Database, sql: Sql) -> None:
        held = {f"held-{place}": insert_job(sql, unique_key=f"held-{place}") for place in range(50)}
        new = []
        for place in range(MANY):
            key = None
            if place % 100 == 7:  # a hundred keys, each twice
                key = f"twin-{place // 200}"
            elif place % 200 == 11:
                key = f"held-{place // 200}"
            delay, span = 60.0 if place % 2 else 0.0, ("00-aa", "b")
            new.append(NewJob(new_job_id(), f'{{"n": {place}}}', key, delay, None, None, *span))
        answers = await enqueue_many(database, KIND, new)
        assert len(answers) == MANY
        first: dict[str, UUID] = {}
        for asked, answer in zip(new, answers, strict=True):
            if asked.unique_key is None:
                assert answer == Enqueued(asked.id, created=True)
            elif asked.unique_key in held:
                assert answer == Enqueued(held[asked.unique_key], created=False)
            else:
                created = asked.unique_key not in first
                assert answer == Enqueued(first.setdefault(asked.unique_key, asked.id), created=created)
        assert len(first) == 50
        assert sum(answer.created for answer in answers) == MANY - 50 - 50
        assert jobs(sql) == 50 + MANY - 50 - 50
        states = sql.execute(
            """
            SELECT status, dispatch, needs_publish, queued_at IS NULL AS unqueued, count(*) AS jobs
            FROM jsworker.jobs WHERE traceparent = '00-aa' AND tracestate = 'b' GROUP BY 1, 2, 3, 4 ORDER BY 1
            """
        ).fetchall()
        assert [tuple(state.values())[:4] for state in states] == [
            ("queued", 1, True, False),
            ("scheduled", 0, False, True),
        ]
        job = read_job(sql, new[1].id)
        assert (job["payload"], job["max_attempts"]) == ({"n": 1}, None)
        assert 30 < seconds_ahead(sql, new[1].id, "run_at") <= 60

    @pytest.mark.usefixtures("copied_or_inserted")
    async def test_limits_of_each_job(self, database: Database, sql: Sql) -> None:
        new = [NewJob(new_job_id(), "{}", max_attempts=2), NewJob(new_job_id(), "{}", max_stalls=7)]
        await enqueue_many(database, KIND, new)
        rows = [read_job(sql, job.id) for job in new]
        assert [(row["max_attempts"], row["max_stalls"]) for row in rows] == [(2, None), (None, 7)]

    async def test_nothing_to_enqueue(self, database: Database) -> None:
        assert await enqueue_many(database, KIND, []) == []

    @pytest.mark.usefixtures("copied_or_inserted")
    async def test_one_bad_job_stores_none(self, database: Database, sql: Sql) -> None:
        """One call of one producer is all or nothing."""
        new = [NewJob(new_job_id(), "{}"), NewJob(new_job_id(), "{"), NewJob(new_job_id(), "{}")]
        with pytest.raises(RowRefused):
            await enqueue_many(database, KIND, new)
        assert jobs(sql) == 0

    async def test_producers_of_the_same_keys_do_not_deadlock(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jsworker.ownership.database._CONFLICT_TRIES", 1)  # so that one would be seen
        keys = [f"k-{place}" for place in range(300)]
        answers = await asyncio.gather(
            *(
                enqueue_many(database, KIND, [NewJob(new_job_id(), "{}", key) for key in order])
                for order in (keys, keys[::-1], keys, keys[::-1])
            )
        )
        assert sum(answer.created for answered in answers for answer in answered) == 300
        assert len({answer.id for answered in answers for answer in answered}) == 300
        assert jobs(sql) == 300


class TestInTheCallersTransaction:
    """The statement belongs to the transaction that executes it: its commit is the job's."""

    @pytest_asyncio.fixture
    async def async_engine(self, database_url: str) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
        yield engine
        await engine.dispose()

    @pytest.fixture
    def orders(self, sql: Sql) -> Iterator[None]:
        sql.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
        yield
        sql.execute("DROP TABLE orders")

    @pytest.mark.usefixtures("orders")
    def test_sync_session(self, engine: Engine, sql: Sql) -> None:
        new = NewJob(new_job_id(), "{}")
        with Session(engine) as session, session.begin():
            session.connection().exec_driver_sql("INSERT INTO orders VALUES (1)")
            row = session.execute(statement_for(KIND, new)).one()
            assert (row.id, row.created, row.dispatch) == (new.id, True, 1)
            assert jobs(sql) == 0
        assert (jobs(sql), read_value(sql, "SELECT count(*) FROM orders")) == (1, 1)

    @pytest.mark.usefixtures("orders")
    def test_sync_session_rolled_back(self, engine: Engine, sql: Sql) -> None:
        with Session(engine) as session:
            session.connection().exec_driver_sql("INSERT INTO orders VALUES (1)")
            session.execute(statement_for(KIND, NewJob(new_job_id(), "{}")))
            session.rollback()
        assert (jobs(sql), read_value(sql, "SELECT count(*) FROM orders")) == (0, 0)

    async def test_async_session(self, async_engine: AsyncEngine, sql: Sql) -> None:
        new = NewJob(new_job_id(), "{}", delay=60.0)
        async with AsyncSession(async_engine) as session, session.begin():
            row = (await session.execute(statement_for(KIND, new))).one()
            assert (row.id, row.created, row.dispatch) == (new.id, True, 0)
            assert jobs(sql) == 0
        assert read_job(sql, new.id)["status"] == "scheduled"

    async def test_async_session_rolled_back(self, async_engine: AsyncEngine, sql: Sql) -> None:
        async with AsyncSession(async_engine) as session:
            await session.execute(statement_for(KIND, NewJob(new_job_id(), "{}")))
            await session.rollback()
        assert jobs(sql) == 0

    def test_an_existing_job_is_named(self, engine: Engine, sql: Sql) -> None:
        holder = insert_job(sql, "processing", unique_key="k-1")
        with Session(engine) as session, session.begin():
            statement = statement_for(KIND, NewJob(new_job_id(), "{}", unique_key="k-1"))
            row = session.execute(statement).one()
        assert (row.id, row.created) == (holder, False)

    def test_a_producers_open_transaction_does_not_hold_the_owner_up(self, engine: Engine, sql: Sql) -> None:
        """Why it is DO NOTHING: the live job's row is not locked by a producer that found it."""
        holder = insert_job(sql, "processing", unique_key="k-1")
        with Session(engine) as session, session.begin():
            statement = statement_for(KIND, NewJob(new_job_id(), "{}", unique_key="k-1"))
            session.execute(statement)
            locked = sql.execute(
                "SELECT id FROM jsworker.jobs WHERE id = %s FOR UPDATE SKIP LOCKED", [holder]
            ).rowcount
            assert locked == 1


class TestUncommittedTwin:
    async def test_enqueue_waits_and_finds_the_committed_twin(
        self, engine: Engine, database: Database, sql: Sql
    ) -> None:
        twin = NewJob(new_job_id(), "{}", unique_key="k-1")
        with engine.connect() as producer:
            producer.execute(statement_for(KIND, twin))
            second = asyncio.create_task(
                enqueue(database, KIND, NewJob(new_job_id(), "{}", unique_key="k-1"), publish_after=0.0)
            )
            await eventually(lambda: waits(sql), "the second producer waits for the first")
            producer.commit()
        assert await second == Enqueued(twin.id, created=False)

    async def test_enqueue_creates_the_job_when_the_twin_is_rolled_back(
        self, engine: Engine, database: Database, sql: Sql
    ) -> None:
        with engine.connect() as producer:
            first = NewJob(new_job_id(), "{}", unique_key="k-1")
            producer.execute(statement_for(KIND, first))
            new = NewJob(new_job_id(), "{}", unique_key="k-1")
            second = asyncio.create_task(enqueue(database, KIND, new, publish_after=0.0))
            await eventually(lambda: waits(sql), "the second producer waits for the first")
            producer.rollback()
        assert await second == Enqueued(new.id, created=True)

    async def test_many(self, engine: Engine, database: Database, sql: Sql) -> None:
        twin = NewJob(new_job_id(), "{}", unique_key="k-1")
        new = [NewJob(new_job_id(), "{}", key) for key in ("k-0", "k-1", "k-2")]
        with engine.connect() as producer:
            producer.execute(statement_for(KIND, twin))
            second = asyncio.create_task(enqueue_many(database, KIND, new))
            await eventually(lambda: waits(sql), "the second producer waits for the first")
            producer.commit()
        assert await second == [
            Enqueued(new[0].id, created=True),
            Enqueued(twin.id, created=False),
            Enqueued(new[2].id, created=True),
        ]


HOSTILE = [
    "\\",
    "\\N",
    "\\.",
    "\\t",
    "a\tb",
    "line\nline\r\n",
    '"',
    "'",
    "{}",
    "\u2028 \U0001f600 \x7f",
    "\\\\n",
    "",
]


@pytest.mark.parametrize(("jobs", "copied"), [(29, 0), (30, 1)])
async def test_many_jobs_are_copied_and_few_inserted(
    database: Database, monkeypatch: pytest.MonkeyPatch, jobs: int, copied: int
) -> None:
    copies = 0
    copy_in = database.copy_in

    async def counted(statement: TextClause, lines: str) -> None:
        nonlocal copies
        copies += 1
        await copy_in(statement, lines)

    monkeypatch.setattr(database, "copy_in", counted)
    new = [NewJob(new_job_id(), "{}") for _ in range(jobs)]
    assert await enqueue_many(database, KIND, new) == [Enqueued(job.id, created=True) for job in new]
    assert copies == copied


@pytest.mark.usefixtures("copied_or_inserted")
class TestCopy:
    """Jobs without keys go the fast ways, and arrive as they were given."""

    async def test_whatever_a_payload_holds_arrives(self, database: Database, sql: Sql) -> None:
        values = [{text: [text, {"deep": text}]} for text in HOSTILE]
        new = [NewJob(new_job_id(), strict_json.dumps(value)) for value in values]
        assert await enqueue_many(database, KIND, new) == [Enqueued(job.id, created=True) for job in new]
        rows = sql.execute("SELECT payload FROM jsworker.jobs ORDER BY id").fetchall()
        assert [row["payload"] for row in rows] == values

    async def test_the_rows_are_those_of_a_single_enqueue(self, database: Database, sql: Sql) -> None:
        one, many = new_job_id(), new_job_id()
        values = ('{"n": 1}', None, 0.0, 3, None, "00-\\a\t", None)
        await enqueue(database, KIND, NewJob(one, *values), publish_after=0.0)
        await enqueue_many(database, KIND, [NewJob(many, *values)])
        rows = [read_job(sql, job_id) for job_id in (one, many)]
        for row in rows:
            for name in ("queued_at", "run_at", "publish_after", "created_at"):
                assert age(sql, row.pop(name)) < 5, name
            del row["id"]
        assert rows[0] == rows[1]
