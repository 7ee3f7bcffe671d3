"""Waiting for jobs to end: what is returned and raised, by one reader for all waiters of a client."""

import asyncio
import copy
import itertools
import json
import pickle
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from nats.js import JetStreamContext

import jsworker
from jsworker import (
    Cron,
    Fail,
    Job,
    JobCancelled,
    JobClient,
    JobFailed,
    JobGone,
    JobHandle,
    JobProcessor,
    JsworkerError,
    Settings,
)
from jsworker.core.errors import DatabaseTimeout, UsageError
from jsworker.ownership.queries.results import JobEnd, read_ends
from jsworker.ownership.transitions.enqueue import Enqueued
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

MakeSettings = Callable[..., Settings]
WITHIN = 60.0
"""Seconds; long enough for a busy machine."""


@pytest.fixture
async def silent(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> JobClient:
    """A client without NATS, not open yet."""
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.2)
    return JobClient(make_settings(nats_url="nats://127.0.0.1:1"))


async def end(rows: Rows, job_id: UUID, *, result: str = "null") -> None:
    """Complete a job in the table alone: no worker hints at it."""
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'completed', needs_publish = false, attempts = 1,"
        " finished_at = clock_timestamp(), result = %s::jsonb WHERE id = %s",
        result,
        job_id,
    )


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[list[UUID]]:
    """Return a list that takes the ids of each read from here on."""
    made: list[list[UUID]] = []

    async def count(database: Any, ids: Sequence[UUID], **limits: Any) -> list[JobEnd]:
        made.append(list(ids))
        return await read_ends(database, ids, **limits)

    monkeypatch.setattr("jsworker.client.results.read_ends", count)
    return made


async def is_awaited(client: JobClient, jobs: int) -> None:
    async def check() -> None:
        assert len(client._results._awaited) == jobs

    await eventually(check)


class TestWhatIsReturned:
    @pytest.mark.parametrize("value", [None, 0, "text", [1, {"deep": [True]}], {"lines": 1234}])
    async def test_the_json_value_of_the_processor(
        self, client: JobClient, start: StartWorker, value: Any
    ) -> None:
        async def process(_job: Job[Any]) -> Any:
            return value

        await start(scripted(process))
        handle = await client.enqueue(KIND, {})
        assert await handle.result(WITHIN) == value
        assert await client.result(handle.id, WITHIN) == value
        assert await client.result(str(handle.id), timeout=timedelta(seconds=WITHIN)) == value

    async def test_of_each_job_of_many(self, client: JobClient, start: StartWorker) -> None:
        async def process(job: Job[Any]) -> Any:
            return job.payload["n"]

        await start(scripted(process))
        handles = await client.enqueue_many(KIND, [{"n": n} for n in range(200)])
        assert await asyncio.gather(*(each.result(WITHIN) for each in handles)) == list(range(200))

    async def test_the_twin_s_result_for_whoever_comes_second(
        self, client: JobClient, start: StartWorker
    ) -> None:
        gate = Gate()
        await start(scripted(gate.process))
        first = await client.enqueue(KIND, {"n": 1}, unique_key="k")
        second = await client.enqueue(KIND, {"n": 2}, unique_key="k")
        assert (second.created, second.id) == (False, first.id)
        gate.open()
        assert await second.result(WITHIN) == {"n": 1}

    async def test_a_result_that_is_too_large_for_an_answer_about_many(
        self, client: JobClient, rows: Rows
    ) -> None:
        handles = await client.enqueue_many(KIND, [{}, {}])
        # What compresses badly is stored in as many bytes.
        await end(rows, handles[0].id)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'completed', needs_publish = false, attempts = 1,"
            " finished_at = clock_timestamp(),"
            " result = (SELECT to_jsonb(string_agg(gen_random_uuid()::text, ''))"
            " FROM generate_series(1, 20000)) WHERE id = %s",
            handles[1].id,
        )
        assert await handles[0].result(WITHIN) is None
        assert len(await handles[1].result(WITHIN)) == 720_000

    async def test_after_tries_that_failed(self, client: JobClient, start: StartWorker) -> None:
        async def process(job: Job[Any]) -> Any:
            if job.attempt < 3:
                raise ValueError("not yet")
            return job.attempt

        await start(scripted(process))
        assert await (await client.enqueue(KIND, {})).result(WITHIN) == 3

    async def test_of_a_schedule_s_job(self, client: JobClient, start: StartWorker) -> None:
        await client.schedules.add("yearly", KIND, Cron("0 0 1 1 *", payload={"n": 1}))
        await start(scripted(echo))
        handle = await client.schedules.run_now("yearly")
        assert await handle.result(WITHIN) == {"n": 1}


class TestWhatIsRaised:
    async def test_failed_with_the_error_and_the_reason(self, client: JobClient, start: StartWorker) -> None:
        async def process(job: Job[Any]) -> Any:
            if job.payload["how"] == "for good":
                raise Fail("no such repository\nsecond line")
            raise ValueError("it broke")

        await start(scripted(process, max_attempts=2))
        for_good, often = await client.enqueue_many(KIND, [{"how": "for good"}, {"how": "often"}])
        with pytest.raises(JobFailed) as failed:
            await for_good.result(WITHIN)
        assert (failed.value.job_id, failed.value.reason) == (for_good.id, "permanent")
        assert failed.value.error is not None
        assert "second line" in failed.value.error
        assert str(failed.value).startswith(f"job {for_good.id} failed (permanent): ")
        assert "no such repository" in str(failed.value)
        assert "\n" not in str(failed.value)
        with pytest.raises(JobFailed, match="it broke") as failed:
            await often.result(WITHIN)
        assert failed.value.reason == "attempts"

    async def test_cancelled(self, client: JobClient) -> None:
        handle = await client.enqueue(KIND, {})
        waiting = asyncio.create_task(handle.result(WITHIN))
        await is_awaited(client, 1)
        await client.cancel(handle.id)
        with pytest.raises(JobCancelled) as cancelled:
            await waiting
        assert cancelled.value.job_id == handle.id
        assert str(cancelled.value) == f"job {handle.id} was cancelled"

    async def test_expired(self, client: JobClient, rows: Rows) -> None:
        handle = await client.enqueue(KIND, {}, expires_in=3600)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'cancelled', failure_reason = 'expired',"
            " needs_publish = false, finished_at = clock_timestamp() WHERE id = %s",
            handle.id,
        )
        with pytest.raises(JobCancelled, match=rf"^job {handle.id} was cancelled \(expired\)$"):
            await handle.result(WITHIN)

    async def test_pruned_and_never_there(self, client: JobClient, rows: Rows) -> None:
        handle = await client.enqueue(KIND, {})
        await end(rows, handle.id)
        await rows.query("DELETE FROM jsworker.jobs WHERE id = %s", handle.id)
        with pytest.raises(
            JobGone, match=rf"^no job has id {handle.id}: .*, or its enqueueing is not committed$"
        ):
            await handle.result(WITHIN)
        never = uuid4()
        with pytest.raises(JobGone) as gone:
            await client.result(never, WITHIN)
        assert (gone.value.job_id, gone.value.error) == (never, None)

    async def test_a_time_out_ends_the_waiting_and_not_the_job(
        self, client: JobClient, start: StartWorker
    ) -> None:
        handle = await client.enqueue(KIND, {"n": 1})
        with pytest.raises(TimeoutError, match=rf"job {handle.id} has not ended within 0.05 s$"):
            await handle.result(timedelta(milliseconds=50))
        await is_awaited(client, 0)
        await start(scripted(echo))
        assert await handle.result(WITHIN) == {"n": 1}

    async def test_a_job_that_is_retried_after_it_failed(
        self, client: JobClient, start: StartWorker, rows: Rows
    ) -> None:
        async def process(job: Job[Any]) -> Any:
            if (await rows.job(job.id))["fencing_token"] == 1:
                raise Fail("once")
            return "well"

        await start(scripted(process))
        handle = await client.enqueue(KIND, {})
        with pytest.raises(JobFailed, match="once"):
            await handle.result(WITHIN)
        await client.retry(handle.id)
        assert await handle.result(WITHIN) == "well"

    @pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), 2e9, timedelta(0)])
    async def test_time_outs_out_of_range(self, client: JobClient, given: Any) -> None:
        with pytest.raises(
            ValueError, match=r"timeout=.* must be more than 0 and at most 1000000000 seconds"
        ):
            await client.result(uuid4(), given)

    @pytest.mark.parametrize("given", ["5", True, b"", [5]])
    async def test_time_outs_that_are_no_number(self, client: JobClient, given: Any) -> None:
        with pytest.raises(TypeError, match=r"timeout=.* must be seconds or a timedelta, not "):
            await client.result(uuid4(), given)

    async def test_ids_that_are_none(self, client: JobClient) -> None:
        with pytest.raises(JsworkerError, match="a job id is a UUID"):
            await client.result("42")
        with pytest.raises(TypeError, match="give its id"):
            await client.result(await client.enqueue(KIND, {}))  # type: ignore[arg-type]

    def test_all_are_exported_and_jsworker_s_own(self) -> None:
        for name in ("JobFailed", "JobCancelled", "JobGone"):
            assert issubclass(getattr(jsworker, name), JsworkerError)
            assert name in jsworker.__all__

    def test_an_error_survives_pickling(self) -> None:
        error = JobFailed("job 1 failed")
        error.error, error.reason = "ValueError", "attempts"
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
        assert (str(again), again.error, again.reason) == ("job 1 failed", "ValueError", "attempts")


class TestHandles:
    async def test_is_the_tuple_that_it_was(self, client: JobClient) -> None:
        handle = await client.enqueue(KIND, {}, unique_key="k")
        job_id, created = handle
        assert (job_id, created) == (handle.id, handle.created) == handle == Enqueued(handle.id, True)
        assert isinstance(handle, Enqueued)
        assert isinstance(handle, JobHandle)
        assert len({handle, Enqueued(handle.id, True)}) == 1
        for again in (copy.copy(handle), pickle.loads(pickle.dumps(handle))):  # noqa: S301 -- our own
            assert again == handle

    async def test_without_a_client(self) -> None:
        with pytest.raises(RuntimeError, match=r"belongs to no client: use client\.result"):
            await JobHandle(uuid4(), created=True).result()

    async def test_of_a_client_that_is_closed(self, settings: Settings) -> None:
        async with JobClient(settings) as client:
            handle = await client.enqueue(KIND, {})
        with pytest.raises(RuntimeError, match="the client is closed"):
            await handle.result(WITHIN)


class TestManyWaiters:
    async def test_ten_thousand_are_read_together(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handles = await client.enqueue_many(KIND, [{}] * 10_000)
        made = reads_of(monkeypatch)
        waiting = [asyncio.create_task(each.result(WITHIN * 2)) for each in handles]
        await is_awaited(client, 10_000)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'completed', needs_publish = false, attempts = 1,"
            " finished_at = clock_timestamp(), result = to_jsonb(id)"
        )
        assert await asyncio.gather(*waiting) == [str(each.id) for each in handles]
        assert len(made) < 200
        assert not client._results._awaited

    async def test_several_for_one_job_share_its_reads(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle = await client.enqueue(KIND, {})
        made = reads_of(monkeypatch)
        waiting = [asyncio.create_task(handle.result(WITHIN)) for _ in range(100)]
        await is_awaited(client, 1)
        await end(rows, handle.id, result="7")
        assert await asyncio.gather(*waiting) == [7] * 100
        assert all(ids == [handle.id] for ids in made)

    async def test_who_comes_later_is_not_told_what_was_read_before(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A job that failed is retried and waited for again, while its failure is on its way to the first."""
        was_read, may_go_on = asyncio.Event(), asyncio.Event()

        async def slow(database: Any, ids: Sequence[UUID], **limits: Any) -> list[JobEnd]:
            ends = await read_ends(database, ids, **limits)
            was_read.set()
            await may_go_on.wait()
            return ends

        monkeypatch.setattr("jsworker.client.results.read_ends", slow)
        handle = await client.enqueue(KIND, {})
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'failed', needs_publish = false, attempts = 1, errors = 1,"
            " finished_at = clock_timestamp() WHERE id = %s",
            handle.id,
        )
        first = asyncio.create_task(handle.result(WITHIN))
        await was_read.wait()
        await client.retry(handle.id)
        second = asyncio.create_task(handle.result(WITHIN))
        await is_awaited(client, 1)
        may_go_on.set()
        with pytest.raises(JobFailed):
            await first
        await is_awaited(client, 1)
        await end(rows, handle.id, result="7")
        assert await second == 7

    async def test_each_gets_a_value_of_its_own(self, client: JobClient, rows: Rows) -> None:
        handle = await client.enqueue(KIND, {})
        waiting = [asyncio.create_task(handle.result(WITHIN)) for _ in range(3)]
        await is_awaited(client, 1)
        await end(rows, handle.id, result='{"list": []}')
        for place, value in enumerate(await asyncio.gather(*waiting)):
            assert value == {"list": []}
            value["list"].append(place)

    async def test_a_value_nested_too_deeply_for_a_copy_leaves_the_others_alone(
        self, client: JobClient, rows: Rows
    ) -> None:
        deep, other = await client.enqueue(KIND, {}), await client.enqueue(KIND, {})
        waiting = [asyncio.create_task(handle.result(WITHIN)) for handle in (deep, deep, other)]
        await is_awaited(client, 2)
        await end(rows, deep.id, result="[" * 700 + "]" * 700)
        outcomes = await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert [type(each) for each in outcomes if not isinstance(each, list)] == [RecursionError]
        await end(rows, other.id, result="7")
        assert await waiting[2] == 7

    async def test_other_tasks_run_between_the_copies(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        turns, copied_at = itertools.count(), list[int]()

        def noting(value: Any) -> Any:
            copied_at.append(next(turns))
            return copy.deepcopy(value)

        async def turn() -> None:
            while True:
                next(turns)
                await asyncio.sleep(0)

        async def changed() -> Any:
            value = await handle.result(WITHIN)
            value["list"].append(1)
            return value

        monkeypatch.setattr("jsworker.client.results.deepcopy", noting)
        handle = await client.enqueue(KIND, {})
        waiting = [asyncio.create_task(changed()) for _ in range(20)]
        await is_awaited(client, 1)
        turning = asyncio.create_task(turn())
        await end(rows, handle.id, result='{"list": []}')
        assert await asyncio.gather(*waiting) == [{"list": [1]}] * 20
        turning.cancel()
        assert len(copied_at) == 19
        assert all(later > earlier + 1 for earlier, later in itertools.pairwise(copied_at))

    async def test_an_error_of_a_copy_reaches_its_waiter_alone(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(_value: Any) -> Any:
            raise MemoryError("no memory for a copy")

        monkeypatch.setattr("jsworker.client.results.deepcopy", refused)
        handle, other = await client.enqueue_many(KIND, [{}] * 2)
        waiting = [asyncio.create_task(each.result(WITHIN)) for each in (handle, handle, other)]
        await is_awaited(client, 2)
        await end(rows, handle.id, result="7")
        outcomes = await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert [type(each) for each in outcomes if each != 7] == [MemoryError]
        await end(rows, other.id, result="8")
        assert await waiting[2] == 8

    async def test_one_that_is_cancelled_leaves_the_others_alone(self, client: JobClient, rows: Rows) -> None:
        handle = await client.enqueue(KIND, {})
        first, second = (asyncio.create_task(handle.result(WITHIN)) for _ in range(2))
        await is_awaited(client, 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await end(rows, handle.id, result="7")
        assert await second == 7

    async def test_nothing_is_read_once_nobody_waits(
        self, client: JobClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle = await client.enqueue(KIND, {})
        waiting = asyncio.create_task(handle.result(WITHIN))
        await is_awaited(client, 1)
        waiting.cancel()
        reading = client._results._reading
        assert reading is not None
        await asyncio.wait({reading}, timeout=WITHIN)
        assert reading.done()
        assert not client._results._due
        made = reads_of(monkeypatch)
        with pytest.raises(JobGone):
            await client.result(uuid4(), WITHIN)  # and it starts again
        assert len(made) == 1

    async def test_a_client_that_is_closed_lets_all_go(self, settings: Settings) -> None:
        client = JobClient(settings)
        await client.open()
        handles = await client.enqueue_many(KIND, [{}] * 20)
        waiting = [asyncio.create_task(each.result()) for each in handles]
        await is_awaited(client, 20)
        await client.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(each) for each in ended} == {"the client was closed"}
        assert all(isinstance(each, RuntimeError) for each in ended)
        with pytest.raises(RuntimeError, match="the client was closed"):
            await client._results.result(handles[0].id, None)  # one that was just about to wait

    async def test_a_client_without_nats_that_is_opened_again_takes_results(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("JSWORKER_NATS_URL", raising=False)
        monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
        client = JobClient.from_env()
        for _ in range(2):
            async with client:
                assert client.publisher.stream is None
                with pytest.raises(JobGone):
                    await client.result(uuid4(), WITHIN)

    async def test_a_full_answer_is_followed_by_another_at_once(
        self, client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handles = await client.enqueue_many(KIND, [{}] * 1_200)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'completed', needs_publish = false, attempts = 1,"
            " finished_at = clock_timestamp()"
        )
        made = reads_of(monkeypatch)
        await asyncio.gather(*(each.result(WITHIN) for each in handles))
        assert [len(ids) for ids in made] == [1_200, 700, 200]


class TestOutages:
    async def test_by_reads_alone_without_nats(self, silent: JobClient, start: StartWorker) -> None:
        gate = Gate()
        await start(scripted(gate.process))
        async with silent as client:
            handle = await client.enqueue(KIND, {"n": 1})
            await gate.met()
            waiting = asyncio.create_task(handle.result(WITHIN))
            await is_awaited(client, 1)
            gate.open()
            assert await waiting == {"n": 1}

    async def test_a_database_that_is_away_for_a_while(
        self, make_settings: MakeSettings, database_url: str, rows: Rows
    ) -> None:
        async with (
            proxied(database_url) as (proxy, url),
            JobClient(make_settings(database_url=url)) as client,
        ):
            handle = await client.enqueue(KIND, {})
            waiting = asyncio.create_task(handle.result(WITHIN))
            await is_awaited(client, 1)
            proxy.cut()

            async def is_troubled() -> None:
                assert client._results._trouble is not None

            await eventually(is_troubled)
            with pytest.raises(TimeoutError, match=r"within 1 s: PostgreSQL at .* is not available"):
                await handle.result(1)
            await end(rows, handle.id, result="7")
            proxy.restore()
            assert await waiting == 7

    @pytest.mark.parametrize("slow", [(12, 0.04), (2, 0.22)])
    async def test_results_that_do_not_come_in_time(
        self,
        make_settings: MakeSettings,
        database_url: str,
        rows: Rows,
        monkeypatch: pytest.MonkeyPatch,
        slow: tuple[int, float],
    ) -> None:
        """Three at a time do, or one in twice the time; more are not tried again after each answer."""
        jobs, delay = slow
        late: list[DatabaseTimeout] = []

        async def read(database: Any, ids: Sequence[UUID], **limits: Any) -> list[JobEnd]:
            try:
                return await read_ends(database, ids, **limits)
            except DatabaseTimeout as error:
                late.append(error)
                raise

        async with (
            proxied(database_url) as (proxy, url),
            JobClient(make_settings(database_url=url)) as client,
        ):
            handles = await client.enqueue_many(KIND, [{}] * jobs)
            for each in handles:
                await end(rows, each.id, result=json.dumps(secrets.token_hex(30_000)))
            with pytest.raises(JobGone):
                await client.result(uuid4(), WITHIN)  # the connection is open
            client.database._statement_timeout = 1.0
            monkeypatch.setattr("jsworker.ownership.database._BYTES_A_SECOND", 6_000_000)
            monkeypatch.setattr("jsworker.client.results.read_ends", read)
            proxy.slow_down(delay, dribble_bytes=8_192)
            results = await asyncio.gather(*(each.result(WITHIN) for each in handles))
            assert {len(each) for each in results} == {60_000}
            assert 2 <= len(late) <= 3

    async def test_an_error_of_the_reader_is_told_to_all_who_wait(
        self, client: JobClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def broken(_database: Any, _ids: Sequence[UUID], **_limits: Any) -> list[JobEnd]:
            raise AssertionError("a fault of the reader")

        monkeypatch.setattr("jsworker.client.results.read_ends", broken)
        handles = await client.enqueue_many(KIND, [{}] * 3)
        ended = await asyncio.gather(*(each.result(WITHIN) for each in handles), return_exceptions=True)
        assert [str(each) for each in ended] == ["a fault of the reader"] * 3


class TestInsideJobs:
    async def test_of_a_kind_that_the_worker_serves_is_refused(
        self, client: JobClient, start: StartWorker
    ) -> None:
        async def process(job: Job[Any]) -> Any:
            if job.payload["child"]:
                return "child"
            try:
                await (await client.enqueue(KIND, {"child": True}, delay=3600)).result(WITHIN)
            except UsageError as error:
                return str(error)

        await start(scripted(process))
        said = await (await client.enqueue(KIND, {"child": False})).result(WITHIN)
        assert f"which serves kind {KIND} itself: jobs that wait could take all of its slots" in said

    async def test_also_from_a_plain_function_and_its_tasks(
        self, client: JobClient, start: StartWorker
    ) -> None:
        loop = asyncio.get_running_loop()

        def process(job: Job[Any]) -> Any:
            async def wait() -> Any:
                child = await client.enqueue(KIND, {"child": True}, delay=3600)
                return await asyncio.create_task(child.result(WITHIN))

            try:
                return asyncio.run_coroutine_threadsafe(wait(), loop).result()
            except UsageError:
                return "refused"

        await start(scripted(process))
        assert await (await client.enqueue(KIND, {})).result(WITHIN) == "refused"

    async def test_of_another_kind_or_of_one_that_has_ended_is_not(
        self, client: JobClient, start: StartWorker
    ) -> None:
        async def wait(job: Job[Any]) -> Any:
            child = await client.enqueue("child", {"n": 3})
            earlier = await client.result(job.payload["earlier"], WITHIN)
            return [await child.result(WITHIN), earlier]

        async def first(job: Job[Any]) -> Any:
            return await wait(job) if "earlier" in job.payload else 1

        async def child(job: Job[Any]) -> Any:
            return job.payload["n"]

        await start(scripted(first))
        await start(scripted(child, kind="child"))
        earlier = await client.enqueue(KIND, {})
        await earlier.result(WITHIN)
        waiting = await client.enqueue(KIND, {"earlier": str(earlier.id)})
        assert await waiting.result(WITHIN) == [3, 1]

    async def test_outside_of_jobs_a_worker_s_own_process_may_wait(
        self, client: JobClient, start: StartWorker
    ) -> None:
        class Twice(JobProcessor[dict[str, int]]):
            async def process(self, job: Job[dict[str, int]]) -> int:
                return 2 * job.payload["n"]

        await start(Twice)
        assert await (await client.enqueue(Twice, {"n": 4})).result(WITHIN) == 8


class TestHints:
    @pytest.fixture(autouse=True)
    def _hints_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Read once, and then when a hint says so."""
        for name in ("_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS"):
            monkeypatch.setattr(f"jsworker.client.results.{name}", 10_000.0)

    async def test_a_worker_says_that_it_has_ended_a_job(self, client: JobClient, start: StartWorker) -> None:
        gate = Gate()

        async def process(job: Job[Any]) -> Any:
            await gate.process(job)
            if job.payload["fails"]:
                raise Fail("no")
            return job.payload

        running = await start(scripted(process))
        handles = await client.enqueue_many(KIND, [{"fails": False}, {"fails": True}])
        waiting = [asyncio.create_task(each.result(WITHIN)) for each in handles]
        for _ in handles:
            await gate.met()
        await is_awaited(client, 2)

        async def knows() -> None:
            hints = running.worker._components.pipeline.hints
            assert {*hints._recent, *hints._earlier} == {each.id.bytes for each in handles}

        await eventually(knows)
        gate.open()
        done, failed = await asyncio.gather(*waiting, return_exceptions=True)
        assert done == {"fails": False}
        assert isinstance(failed, JobFailed)

    async def test_also_after_the_worker_has_found_the_client_later(
        self, client: JobClient, start: StartWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jsworker.client.results.RENEW_SECONDS", 0.1)
        handle = await client.enqueue(KIND, {"n": 1})
        waiting = asyncio.create_task(handle.result(WITHIN))
        await is_awaited(client, 1)
        gate = Gate()
        running = await start(scripted(gate.process))
        await gate.met()

        async def knows() -> None:
            assert running.worker._components.pipeline.hints.somebody_waits

        await eventually(knows)
        gate.open()
        assert await waiting == {"n": 1}

    async def test_jobs_that_nobody_waits_for_say_nothing(
        self, client: JobClient, start: StartWorker, js: JetStreamContext, rows: Rows
    ) -> None:
        said = await js._nc.subscribe("jsworker.>")
        await js._nc.flush()
        await start(scripted(echo))
        for each in await client.enqueue_many(KIND, [{}] * 50):
            await rows.becomes(each.id, "completed")
        await js._nc.flush()
        subjects = {(await said.next_msg()).subject for _ in range(said.pending_msgs)}
        assert not [each for each in subjects if not each.startswith("jsworker.worker.")]

    async def test_forged_ones_make_few_reads(
        self, client: JobClient, js: JetStreamContext, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = reads_of(monkeypatch)
        handle = await client.enqueue(KIND, {})
        waiting = asyncio.create_task(handle.result(WITHIN))
        await is_awaited(client, 1)
        await eventually(partial(announced, client))
        hints = client._results._hints
        assert hints is not None
        for _ in range(200):
            await js._nc.publish(f"jsworker.ended.{hints._token}", handle.id.bytes)
            await js._nc.publish(f"jsworker.ended.{hints._token}", uuid4().bytes)
        await js._nc.flush()

        async def used_up() -> None:
            assert client._results._awaited[handle.id].hints == 10

        await eventually(used_up)
        assert len(made) <= 12
        assert {len(ids) for ids in made} == {1}
        waiting.cancel()
        await end(rows, handle.id, result="7")
        assert await handle.result(WITHIN) == 7


async def announced(client: JobClient) -> None:
    """Check that the server has what the client said."""
    hints, stream = client._results._hints, client.publisher.stream
    assert hints is not None
    assert stream is not None
    assert hints._listening is not None
    assert not client._results._unannounced
    assert await stream.flush(10)
