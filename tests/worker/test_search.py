"""Searches that take longer than a statement may: they are made all the same, and nothing else suffers."""

from typing import Any

import pytest
from sqlalchemy import TextClause, text

from jsworker import JobClient
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Pool
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import heartbeat, republish, reset
from jsworker.worker.maintenance import throttled_scan
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from tests.support.clock import Clock
from tests.support.contexts import make_context
from tests.worker.lives import Lives
from tests.worker.processors import KIND, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

LEAST = 1.0
TIMEOUT = 1.5

pytestmark = pytest.mark.hurried


class Searching:
    """A search whose statement takes as long as the test says."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self.database = database
        self.clock = clock
        self.heard = Recorder()
        events = Events()
        events.on("*", self.heard)
        settings = settings.model_copy(update={"statement_timeout": LEAST, "stale_threshold": 600.0})
        self.search = ThrottledScan(make_context(database, events=events, settings=settings), "that")
        self.given: list[float] = []

    async def make(self, takes: float, *, is_answered: bool = True) -> list[Any] | None:
        """Search; one that is to be answered is, and in time, however busy the machine is."""

        async def ask(seconds: float) -> list[Any]:
            self.given.append(seconds)
            statement = text("SELECT 1 FROM pg_sleep(CAST(:takes AS float))")
            allowed = 60.0 if is_answered else seconds
            self.clock.now += min(takes, allowed)
            return list(await self.database.run(statement, {"takes": takes}, seconds=allowed))

        return await self.search.make(ask)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throttled_scan, "boottime", made)
    return made


@pytest.fixture
def searching(database: Database, settings: Settings, clock: Clock) -> Searching:
    return Searching(database, settings, clock)


async def test_a_search_that_goes_unanswered_gets_more_time_and_is_told_once(searching: Searching) -> None:
    assert searching.search.is_slow is False
    assert await searching.make(3 * LEAST, is_answered=False) is None
    assert searching.search.is_slow
    assert await searching.make(1.2 * LEAST) == [(1,)]
    assert await searching.make(0.0) == [(1,)]
    assert await searching.make(0.0) == [(1,)]
    assert searching.given == [LEAST, 2 * LEAST, 2 * LEAST, LEAST]
    [degraded] = searching.heard.of("worker.degraded")
    assert degraded["what"] == "looking for that"
    assert (
        "did not answer within 1 s, but answers at once otherwise; is the line busy, or a transaction open"
        in degraded["reason"]
    )
    assert [event["what"] for event in searching.heard.of("worker.restored")] == ["looking for that"]


async def test_a_search_is_given_ten_times_its_time_at_most(searching: Searching) -> None:
    searching.search._seconds = 8 * LEAST
    searching.search._grow(DatabaseUnavailable("it did not answer"))
    searching.search._grow(DatabaseUnavailable("it did not answer"))
    assert await searching.make(0.0) == [(1,)]
    assert searching.given == [10 * LEAST]


async def test_a_search_that_went_unanswered_rests(searching: Searching) -> None:
    assert searching.search.is_due
    await searching.make(2 * LEAST, is_answered=False)
    assert not searching.search.is_due


async def test_a_quick_search_beside_a_slow_one_does_not_end_its_rest(searching: Searching) -> None:
    await searching.make(2 * LEAST, is_answered=False)
    await searching.make(0.0)
    assert not searching.search.is_due


async def test_a_database_that_answers_nothing_is_no_slow_search(settings: Settings, clock: Clock) -> None:
    nobody = Database("postgresql://nobody@127.0.0.1:1/nothing", statement_timeout=0.5)
    searching = Searching(nobody, settings, clock)
    with pytest.raises(DatabaseUnavailable):
        await searching.make(0.0)
    assert searching.given == [LEAST]
    assert searching.heard.names() == []
    assert searching.search.is_due  # once it answers again, silent owners are looked for at once
    await nobody.close()


async def test_a_connection_that_breaks_is_no_slow_search(searching: Searching) -> None:
    async def ask(_: float) -> list[Any]:
        raise DatabaseUnavailable("terminating connection due to administrator command")

    with pytest.raises(DatabaseUnavailable):
        await searching.search.make(ask)
    assert not searching.search.is_slow
    assert searching.search.is_due


async def test_a_search_that_a_row_fails_is_named(searching: Searching) -> None:
    async def ask(_: float) -> None:
        await searching.database.run(text("SELECT now() + interval '178000000 years'"))

    for _ in range(2):
        with pytest.raises(RowRefused):
            await searching.search.make(ask)
    reason = "PostgreSQL refused a row: SQLSTATE 22008"
    told = [(event["what"], event["reason"]) for event in searching.heard.of("worker.degraded")]
    assert told == [("looking for that", reason)]
    await searching.make(0.0)
    assert [event["what"] for event in searching.heard.of("worker.restored")] == ["looking for that"]


async def test_who_lives_is_not_late_at_the_end_of_a_long_search(
    client: JobClient, settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the brake for mass events would hold the jobs of the one owner who is dead."""
    lives = Lives(client.database, rows, settings)
    for name in ("one", "two", "three"):
        await lives.add(name)
    dead = await lives.hold("dead", silent_for=60.0)
    slow = "WHERE status || '' = 'processing' AND (SELECT pg_sleep(4.5) IS NOT NULL)"
    sql = str(reset.LATE.text)
    assert sql.count("WHERE status || '' = 'processing'") == 1
    monkeypatch.setattr(reset, "LATE", text(sql.replace("WHERE status || '' = 'processing'", slow)))
    found = await reset.look_for_late(client.database, heartbeat_interval=2.0, limit=10, seconds=60.0)
    assert [row.id for row in found.suspects] == [dead]
    assert found.owners == 4


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[TextClause]:
    """Statements that take longer than a statement may, as behind millions of dead rows."""
    slowed: list[TextClause] = []
    execute = Pool.execute

    async def execute_slowly(self: Pool, statement: TextClause, *arguments: Any, **rest: Any) -> Any:
        if statement in slowed:
            await execute(self, text(f"SELECT pg_sleep({1.5 * TIMEOUT})"), None)
        return await execute(self, statement, *arguments, **rest)

    monkeypatch.setattr(Pool, "execute", execute_slowly)
    monkeypatch.setattr("jsworker.worker.recovery.sweeper._REST", 1)
    return slowed


async def test_while_every_search_is_slow_jobs_are_done_and_those_of_the_dead_taken_back(
    client: JobClient, settings: Settings, start: StartWorker, rows: Rows, slow: list[TextClause]
) -> None:
    times = {"statement_timeout": TIMEOUT, "heartbeat_interval": 1.2 * TIMEOUT}
    limits = {"crash_threshold": None, "stale_threshold": 30.0, "ack_wait": 60.0}
    running = await start(scripted(echo), with_settings=settings.model_copy(update=times | limits))
    slow += [reset.LATE, heartbeat.ORPHANED, republish.WAITING, republish.WAITING_BESIDES, republish.POSTED]
    running.worker._components.heartbeat.look_for_orphaned_claims()
    lives = Lives(client.database, rows, settings)
    dead = await lives.add("dead", job=False)
    orphan = await lives.hold(dead.id, silent_for=60.0, stale_after=2.0)
    done = [(await client.enqueue(KIND, {"n": n})).id for n in range(20)]
    await rows.becomes(orphan, "queued")
    for job_id in done:
        await rows.becomes(job_id, "completed")
    told = {event["what"] for event in running.events.of("worker.degraded")}
    assert {what for what in told if not what.startswith("looking for ")} == set()
    assert {"looking for silent owners", "looking for orphaned claims"} <= told
    assert "heartbeat.failed" not in running.events.names()
    slow.clear()
    await running.events.told("worker.restored")
