"""Retention: workers delete what ended long ago, by the way, and never to the harm of anything else."""

from collections.abc import Callable

import pytest

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import prune
from jsworker.ownership.transitions.prune import FIRST_LIMIT
from jsworker.ownership.transitions.refused_rows import marks_of
from jsworker.worker.maintenance import retention as module
from jsworker.worker.maintenance.retention import Retention
from jsworker.worker.worker import WorkerDied
from tests.ownership.rows import Sql, slow_rows
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

DAY = 86_400.0
MakeSettings = Callable[..., Settings]

OLD_JOBS = """
INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), 'old', '{}', 'completed', 1, 1, clock_timestamp() - interval '2 days', 1
FROM generate_series(1, %s)
"""
TIMELINES = "INSERT INTO jsworker.job_events (job_id, event) SELECT id, 'released' FROM jsworker.jobs"
LEFT = "SELECT count(*) FROM jsworker.jobs WHERE kind = 'old'"
WORKERS = """
INSERT INTO jsworker.workers
  (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)
SELECT 'other-' || n, 'elsewhere', 1, '{}', 1, '1', '5 s', %s, clock_timestamp() - %s * interval '1 second'
FROM generate_series(1, %s) AS n
"""

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(retention=DAY)


@pytest.fixture
def one_pass_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PASS_SECONDS", 0.05)


class Alone:
    """A retention without a worker, stepped by the test; ``readings`` are those of its clock."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.told = Recorder()
        events = Events()
        events.on("*", self.told)
        context = make_context(database, events=events, settings=settings)
        self.health = context.health
        self.retention = Retention(context)
        self.readings: list[float] = []

    def clock(self) -> float:
        self.readings.append(boottime())
        return self.readings[-1]

    @property
    def rests_until(self) -> float:
        return self.retention._rests_until

    async def step_at_once(self) -> None:
        self.retention._rests_until = 0.0
        await self.retention.step()

    async def delete_some(self, rows: Rows, *, of: int) -> tuple[float, float]:
        """Step until a round has deleted jobs, not only looked for workflows; return its length and rest.

        Both as it has measured them itself: this process may stand still before the test looks at its clock.
        """
        while await rows.value(LEFT) == of:
            self.readings.clear()
            await self.step_at_once()
        _, began, *_, ended = self.readings
        return ended - began, self.rests_until - ended

    async def finish(self) -> None:
        """Step until nothing is left."""
        await self.step_at_once()
        while self.retention._ended is not None:
            await self.step_at_once()


@pytest.fixture
def alone(database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Alone:
    made = Alone(database, settings)
    monkeypatch.setattr(module, "boottime", made.clock)
    return made


class TestWorker:
    async def test_it_deletes_what_is_old_while_it_works(
        self, client: JobClient, rows: Rows, start: StartWorker
    ) -> None:
        await rows.query(OLD_JOBS, 300)
        await rows.query(TIMELINES)
        running = await start(scripted(echo))
        job = await client.enqueue(KIND, {})
        await rows.becomes(job.id, "completed")
        told = await running.events.told("jobs.pruned")
        assert told == [{"jobs": 300, "entries": 300}]
        assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 1
        assert await rows.value("SELECT count(*) FROM jsworker.job_events") == 0

    @pytest.mark.usefixtures("one_pass_after_the_other")
    async def test_it_begins_again(self, rows: Rows, start: StartWorker) -> None:
        running = await start(scripted(echo))
        for times in (1, 2):
            await rows.query(OLD_JOBS, 1)
            await running.events.told("jobs.pruned", times=times)

    async def test_without_retention_everything_stays(
        self, rows: Rows, start: StartWorker, make_settings: MakeSettings
    ) -> None:
        await rows.query(OLD_JOBS, 1)
        running = await start(scripted(echo), with_settings=make_settings(retention="none"))
        components = running.worker._components
        assert components.retention._task is None
        await rounds_pass(count_rounds(components.looks), 5)
        assert await rows.value(LEFT) == 1

    @pytest.mark.usefixtures("one_pass_after_the_other")
    async def test_several_delete_each_job_once(self, rows: Rows, start: StartWorker) -> None:
        workers = [await start(scripted(echo)) for _ in range(3)]
        await rows.query(OLD_JOBS, 5000)

        async def all_gone() -> None:
            assert await rows.value(LEFT) == 0
            told = [event["jobs"] for each in workers for event in each.events.of("jobs.pruned")]
            assert sum(told) == 5000

        await eventually(all_gone, seconds=120)

    @pytest.mark.usefixtures("one_pass_after_the_other")
    async def test_it_ends_before_the_jobs_do(
        self, client: JobClient, rows: Rows, start: StartWorker, settings: Settings
    ) -> None:
        gate = Gate()
        patient = settings.model_copy(update={"shutdown_timeout": 60.0})
        running = await start(scripted(gate.process), with_settings=patient)
        components = running.worker._components
        await client.enqueue(KIND, {})
        await gate.met()
        running.worker.stop()

        async def ended() -> None:
            assert components.retention._task is not None
            assert components.retention._task.done()

        await eventually(ended)
        await rows.query(OLD_JOBS, 1)
        await rounds_pass(count_rounds(components.looks), 5)
        assert await rows.value(LEFT) == 1
        gate.open()

    async def test_a_bug_in_it_stops_the_worker(self, start: StartWorker) -> None:
        async def broken() -> None:
            raise ZeroDivisionError("a bug")

        running = await start(scripted(echo))
        running.may_die = True
        components = running.worker._components
        await rounds_pass(
            count_rounds(components.retention), 2
        )  # a worker that ends while it connects is another test
        components.retention._step = broken
        components.retention.wake()
        await running.events.told("worker.stopped")
        assert isinstance(running.worker._error, WorkerDied)
        assert str(running.worker._error) == "retention ended in ZeroDivisionError: a bug"


class TestPace:
    async def test_a_round_is_short_and_a_rest_follows(self, alone: Alone, rows: Rows) -> None:
        await rows.query(OLD_JOBS, 50_000)
        took, rest = await alone.delete_some(rows, of=50_000)
        left = await rows.value(LEFT)
        assert left > 0
        assert rest == pytest.approx(9 * took, rel=0.5)
        alone.retention._rests_until = boottime() + 60.0
        await alone.retention.step()  # too early
        assert await rows.value(LEFT) == left

    async def test_the_more_workers_run_the_longer_each_rests(self, alone: Alone, rows: Rows) -> None:
        await rows.query(WORKERS, "running", 1, 20)
        await rows.query(OLD_JOBS, 50_000)
        took, rest = await alone.delete_some(rows, of=50_000)
        assert rest == pytest.approx(199 * took, rel=0.5)

    async def test_a_pass_ends_with_a_long_rest_and_one_word(self, alone: Alone, rows: Rows) -> None:
        await rows.query(OLD_JOBS, 2500)
        began = boottime()
        await alone.finish()
        assert await rows.value(LEFT) == 0
        assert alone.rests_until > began + 59
        assert alone.told.of("jobs.pruned") == [{"jobs": 2500, "entries": 0}]

    async def test_a_long_pass_is_told_of_in_between(
        self, alone: Alone, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_REPORT_SECONDS", 0.0)
        await rows.query(OLD_JOBS, 2500)
        await alone.finish()
        told = [event["jobs"] for event in alone.told.of("jobs.pruned")]
        assert len(told) > 1
        assert sum(told) == 2500

    async def test_nothing_old_is_not_worth_a_word(self, alone: Alone) -> None:
        await alone.finish()
        assert alone.told.names() == []

    async def test_workers_that_are_long_dead_are_forgotten(self, alone: Alone, rows: Rows) -> None:
        await rows.query(WORKERS, "running", 2 * DAY, 3)
        await alone.finish()
        assert await rows.value("SELECT count(*) FROM jsworker.workers") == 0


class TestTrouble:
    async def test_while_the_database_does_not_answer_nothing_is_asked(
        self, alone: Alone, rows: Rows
    ) -> None:
        await rows.query(OLD_JOBS, 1)
        alone.health._up.clear()
        await alone.step_at_once()
        assert await rows.value(LEFT) == 1
        alone.health._up.set()
        await alone.step_at_once()
        assert await rows.value(LEFT) == 0

    async def test_after_a_batch_that_takes_too_long_the_pass_goes_on_with_smaller_ones_down_to_one_job(
        self, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prune, "_LONGER", 1)  # a job alone takes no longer than others
        await rows.query(OLD_JOBS, 10)
        database = Database(settings.database_dsn(), statement_timeout=1.0)
        alone = Alone(database, settings)

        async def next_limit() -> int:
            """Make steps until the limit changes: workflows come first, perhaps in a step of their own."""
            limit = alone.retention._limit
            while alone.retention._limit == limit:
                await alone.retention.step()
                alone.retention._rests_until = 0.0
            return alone.retention._limit

        async with rows.connection.transaction():
            await rows.query("LOCK TABLE jsworker.jobs IN ACCESS EXCLUSIVE MODE")
            assert [await next_limit() for _ in range(3)] == [FIRST_LIMIT // 4, FIRST_LIMIT // 16, 1]
            assert alone.told.of("prune.failed") == []
            began = boottime()
            await alone.retention.step()
            [failed] = alone.told.of("prune.failed")
            assert "did not answer within 1 s" in failed["reason"]
            assert alone.health.up  # heartbeats tell that, not a statement that may have been too large
            assert alone.rests_until > began + 59

        async def answered() -> None:
            await alone.finish()
            assert await rows.value(LEFT) == 0

        await eventually(answered)
        await database.close()

    @pytest.mark.parametrize(("seconds", "left"), [(3.0, 0), (60.0, 1)])
    async def test_a_job_that_takes_too_long_by_itself_holds_up_no_other(
        self, rows: Rows, sql: Sql, settings: Settings, *, seconds: float, left: int
    ) -> None:
        await rows.query(OLD_JOBS, 20)
        slow = await rows.value("SELECT id FROM jsworker.jobs ORDER BY id LIMIT 1")
        await rows.query(
            "UPDATE jsworker.jobs SET finished_at = finished_at - interval '1 h' WHERE id = %s", slow
        )
        with slow_rows(sql, "DELETE", "jobs", seconds, when=f"old.id = '{slow}'"):
            async with Database(settings.database_dsn(), statement_timeout=1.5) as database:
                alone = Alone(database, settings)

                async def pruned() -> None:
                    await alone.finish()
                    assert await rows.value(LEFT) == left
                    marks = (await marks_of(database, [slow])).get(slow, [])
                    assert [(mark.attempted, mark.sqlstate) for mark in marks] == [("prune", "57014")] * left

                # Passes with fewer and fewer jobs; what a statement given up still locks is passed over.
                await eventually(pruned)
        assert alone.health.up

    async def test_a_refusal_is_told(self, alone: Alone, rows: Rows) -> None:
        await rows.query("ALTER TABLE jsworker.job_events RENAME TO hidden")

        async def is_told() -> None:
            await alone.step_at_once()  # one may end before it comes to the jobs
            assert alone.told.of("prune.failed")

        await eventually(is_told)
        [failed] = alone.told.of("prune.failed")
        assert "42P01" in failed["reason"]

    async def test_workflows_that_are_kept_are_told_once(self, alone: Alone, rows: Rows) -> None:
        await rows.query(
            "INSERT INTO jsworker.workflows (id, name, finished_at, outcome) SELECT gen_random_uuid(), 'old',"
            " clock_timestamp() - interval '2 days', 'completed' FROM generate_series(1, 3)"
        )
        await rows.query("CREATE TABLE kept (workflow uuid REFERENCES jsworker.workflows (id))")
        await rows.query("INSERT INTO kept SELECT id FROM jsworker.workflows")
        await rows.query(OLD_JOBS, 1)
        for _ in range(2):
            await alone.finish()
        assert await rows.value(LEFT) == 0
        [failed] = alone.told.of("prune.failed")
        assert "and 2 others kept, with the jobs" in failed["reason"]
        assert "23503, kept_workflow_fkey" in failed["reason"]
