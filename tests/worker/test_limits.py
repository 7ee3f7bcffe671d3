"""Limits, rates and pauses in real workers: how many run at once, and that what is held goes on."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any
from uuid import UUID

import pytest

from jsworker import JobClient, Limit, Rate, Retry
from jsworker.core.errors import DatabaseUnavailable, SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import admission, limits
from jsworker.ownership.transitions import claim as claims
from jsworker.worker.maintenance import admissions
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


class Crowd:
    """How many jobs of each key run at once, at most; each runs until all workers had time for others."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.ended = 0

    async def process(self, job: Job[Any]) -> None:
        key = str(job.payload.get("tenant", ""))
        self.running[key] = self.running.get(key, 0) + 1
        self.most[key] = max(self.most.get(key, 0), self.running[key])
        await asyncio.sleep(0.01)
        self.running[key] -= 1
        self.ended += 1


async def ended(rows: Rows, number: int) -> None:
    async def all_of_them() -> None:
        left = await rows.query(
            "SELECT id, status, held_by, needs_publish FROM jsworker.jobs WHERE status <> 'completed'"
        )
        assert await rows.value("SELECT count(*) FROM jsworker.jobs") - len(left) == number, left[:3]

    await eventually(all_of_them)


def tenant_of(payload: Any) -> Any:
    return payload["tenant"]


@pytest.mark.parametrize("key", ["tenant", tenant_of])
async def test_of_each_key_no_more_run_than_its_limit_in_all_workers(
    client: JobClient, rows: Rows, start: StartWorker, key: str | Callable[[Any], Any]
) -> None:
    crowd = Crowd()
    processor = scripted(crowd.process, limit=Limit(2, key=key))
    for _ in range(3):
        await start(processor)
    await client.enqueue_many(type(processor), [{"tenant": f"t{n % 4}"} for n in range(120)])
    await ended(rows, 120)
    assert crowd.most == {f"t{n}": 2 for n in range(4)}


async def test_keys_unused_for_an_hour_are_tidied_away_one_step_after_another(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "TIDY_SECONDS", 0.0)
    await rows.query(
        "INSERT INTO jsworker.limits (kind, key, used_at) SELECT 'other', 'a' || n,"
        " clock_timestamp() - interval '2 h' FROM generate_series(1, 2500) AS n RETURNING key"
    )
    running = await start(scripted(echo))
    await client.pause(KIND)
    await running.events.told("limit.paused")
    await client.resume(KIND)  # which begins a step

    async def tidied() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.limits WHERE kind = 'other'") == 0

    await eventually(tidied)


async def test_a_worker_tells_in_its_row_what_its_classes_declare(rows: Rows, start: StartWorker) -> None:
    await start(
        scripted(echo, kind="free"),
        scripted(echo, kind="limited", limit=Limit(2, key="tenant"), rate=Rate(50, per=60, key="tenant")),
        scripted(echo, kind="called", limit=Limit(1, key=tenant_of)),
        scripted(echo, kind="rated", rate=Rate(5)),
    )
    assert await rows.value("SELECT limits FROM jsworker.workers") == {
        "limited": {"max_running": 2, "rate": 50, "per": 60.0, "key": "'tenant'"},
        "called": {"max_running": 1, "rate": None, "per": None, "key": "tenant_of"},
        "rated": {"max_running": None, "rate": 5, "per": 1.0, "key": None},
    }


async def test_of_a_kind_no_more_run_than_its_limit(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    crowd = Crowd()
    for _ in range(2):
        await start(scripted(crowd.process, limit=Limit(1)))
    await client.enqueue_many(KIND, [{}] * 40)
    await ended(rows, 40)
    assert crowd.most == {"": 1}


async def test_a_job_that_is_held_is_told_and_its_message_is_answered(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    release = asyncio.Event()

    async def process(_: Job[Any]) -> None:
        await release.wait()

    running = await start(scripted(process, limit=Limit(1)))
    first = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    second = await client.enqueue(KIND, {})
    [held] = await running.events.told("job.held")
    assert (held["job_id"], held["held_by"], held["key"]) == (str(second.id), "limit", "")
    release.set()
    await ended(rows, 2)
    assert first.created
    events = await rows.query("SELECT event FROM jsworker.job_events WHERE job_id = %s", second.id)
    assert [row["event"] for row in events] == ["held"]


async def test_a_job_of_another_key_does_not_wait_for_each_message_of_a_full_one(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, other kinds have their slots."""
    gate, admit, sizes = Gate(), admission.admit, list[int]()

    async def process(job: Job[Any]) -> None:
        if job.payload["tenant"] == "a":
            await gate.process(job)

    async def counted(*args: Any, ids: Sequence[UUID] = (), **values: Any) -> Any:
        sizes.append(len(ids))
        return await admit(*args, ids=ids, **values)

    monkeypatch.setattr(admission, "admit", counted)
    processor = scripted(process, limit=Limit(1, key="tenant"))
    running = await start(
        processor, scripted(echo, kind="other"), with_settings=settings.model_copy(update={"concurrency": 3})
    )
    await client.enqueue(type(processor), {"tenant": "a"})
    await gate.met()
    await client.enqueue_many(type(processor), [{"tenant": "a"}] * 1_000)
    [first, *_] = await client.enqueue_many(type(processor), [{"tenant": f"b{n}"} for n in range(20)])
    others = await client.enqueue_many("other", [{}] * 20)
    await rows.becomes(first.id, "completed")
    assert len(sizes) < 150
    for each in others:
        await rows.becomes(each.id, "completed")
    await ended(rows, 40)
    in_flight = running.worker._context.in_flight

    async def none_is_claimed() -> None:
        assert (in_flight.surplus, len(in_flight.claiming)) == (0, 0)

    await eventually(none_is_claimed)
    gate.open()


async def test_a_slot_that_nobody_gave_back_is_found_by_a_scan(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """Its owner died, say, after the commit and before it claimed what was held."""
    job = await client.enqueue("elsewhere", {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = NULL, held_by = 'limit', held_at = now(), limit_key = 't',"
        " kind = %s WHERE id = %s",
        KIND,
        job.id,
    )
    await start(scripted(echo, limit=Limit(1, key="tenant")))
    await ended(rows, 1)


async def test_a_job_that_is_held_while_an_older_one_is_claimed_in_its_place_is_let_go(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    older = await client.enqueue("elsewhere", {}, delay=3600)
    calm = make_settings(scan_interval=600.0, stale_threshold=3600.0, ack_wait=7200.0)
    running = await start(scripted(echo, limit=Limit(1)), with_settings=calm)
    [consumer] = running.worker._components.pipeline.consumers
    await client.enqueue(KIND, {})
    await ended(rows, 1)

    async def looked_for_more() -> None:
        assert not running.worker._context.in_flight.runs
        assert not consumer._freed.is_busy

    await eventually(looked_for_more)
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = NULL, held_by = 'limit', held_at = now(), limit_key = '',"
        " kind = %s, queued_at = now() - interval '1 hour' WHERE id = %s",
        KIND,
        older.id,
    )
    await client.enqueue(KIND, {})  # its admission finds the older one, and room for one
    await ended(rows, 3)
    assert not running.worker._context.in_flight.claiming
    await running.stream_is_empty()


async def test_held_jobs_of_kinds_that_others_run_are_woken(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    job = await client.enqueue("elsewhere", {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = NULL, held_by = 'limit', held_at = now(), limit_key = 't'"
        " WHERE id = %s",
        job.id,
    )
    running = await start(scripted(echo))
    [woken] = await running.events.told("jobs.woken")
    assert (woken["kind"], woken["jobs"]) == ("elsewhere", 1)
    [row] = await rows.query("SELECT status FROM jsworker.jobs")
    assert row["status"] == "queued"


async def test_with_very_many_keys_that_are_free_the_rest_waits_for_no_scan(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admissions, "_MOST_PAGES", 1)
    keys = 2 * admission.MOST_KEYS + 50
    await client.enqueue_many("elsewhere", [{}] * keys, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = NULL, held_by = 'limit', held_at = now(), limit_key = id::text"
    )
    calm = make_settings(scan_interval=600.0, stale_threshold=3600.0, ack_wait=7200.0)
    await start(scripted(echo), with_settings=calm)

    async def all_are_queued() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'queued'") == keys

    await eventually(all_are_queued)


async def test_a_worker_knows_limits_and_pauses_before_its_first_claim(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    crowd, other = Crowd(), Crowd()
    await client.limits.set(KIND, Limit(1))
    await client.pause("resting")
    await client.enqueue_many(KIND, [{}] * 60)
    await client.enqueue_many("resting", [{}] * 20)
    for _ in range(3):
        await start(scripted(crowd.process), scripted(other.process, kind="resting"))

    async def limited_ended() -> None:
        left = await rows.value(
            "SELECT count(*) FROM jsworker.jobs WHERE kind <> 'resting' AND finished_at IS NULL"
        )
        assert left == 0

    await eventually(limited_ended)
    assert crowd.most == {"": 1}
    assert other.most == {}
    await client.resume("resting")
    await ended(rows, 80)


async def test_what_is_held_in_favour_of_another_is_answered(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """A message brings one job, and admission claims another one that was held before it."""
    gate = Gate()
    running = await start(scripted(gate.process, limit=Limit(1)))
    await client.enqueue_many(KIND, [{}] * 3)
    in_flight = running.worker._context.in_flight

    async def two_are_held() -> None:
        held = await rows.value("SELECT count(*) FROM jsworker.jobs WHERE held_by = 'limit'")
        assert (held, gate.waiting, len(in_flight.claiming)) == (2, 1, 0)

    await eventually(two_are_held)
    first_held = await rows.value(
        "SELECT id FROM jsworker.jobs WHERE held_by = 'limit' ORDER BY queued_at, id LIMIT 1"
    )
    # The slot falls free without a word: the owner has gone, say.
    await rows.query("UPDATE jsworker.limits SET max_running = 2")
    late = (await client.enqueue(KIND, {})).id

    async def decided() -> None:
        held = await rows.query("SELECT id FROM jsworker.jobs WHERE held_by = 'limit'")
        assert {row["id"] for row in held} >= {late}
        assert first_held not in {row["id"] for row in held}
        assert not in_flight.claiming

    await eventually(decided)
    gate.open()
    await ended(rows, 4)


async def test_a_worker_learns_of_an_operators_limit(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    crowd = Crowd()
    running = await start(scripted(crowd.process))
    [consumer] = running.worker._components.pipeline.consumers
    await client.limits.set(KIND, Limit(1))

    async def learned() -> None:
        assert consumer.state.is_limited

    await eventually(learned)
    await client.enqueue_many(KIND, [{}] * 20)
    await ended(rows, 20)
    assert crowd.most == {"": 1}


async def test_claims_on_their_way_when_a_limit_is_learned_take_slots_too(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_claim, release = asyncio.Event(), asyncio.Event(), asyncio.Event()
    counts: list[str] = []
    claim, count_running = claims.claim, limits.count_running

    async def late_claim(*args: Any, **values: Any) -> Any:
        asked.set()
        await may_claim.wait()
        return await claim(*args, **values)

    async def count_not_at_first(database: Database, kind: str) -> bool:
        counts.append(kind)
        if len(counts) == 1:
            raise DatabaseUnavailable("the test says so")
        return await count_running(database, kind)

    async def process(_: Job[Any]) -> None:
        await release.wait()

    await start(scripted(process))
    monkeypatch.setattr(claims, "claim", late_claim)
    first = await client.enqueue(KIND, {})
    await asked.wait()
    await client.limits.set(KIND, Limit(1))
    monkeypatch.setattr(limits, "count_running", count_not_at_first)

    async def counted() -> None:
        assert len(counts) >= 3

    await eventually(counted)
    may_claim.set()
    await rows.becomes(first.id, "processing")

    async def takes_a_slot() -> None:
        assert (await rows.job(first.id))["limit_key"] == ""

    await eventually(takes_a_slot)
    release.set()


async def test_a_job_with_a_key_goes_by_admission_wherever_it_is_claimed(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await client.pause(KIND, "tenant-7", reason="their API is down")
    await start(scripted(echo))
    held = await client.enqueue(KIND, {}, limit_key="tenant-7")
    await client.enqueue(KIND, {}, limit_key="tenant-8")
    await client.enqueue(KIND, {})
    await ended(rows, 2)

    async def is_held() -> None:
        [row] = await rows.query("SELECT held_by FROM jsworker.jobs WHERE id = %s", held.id)
        assert row["held_by"] == "paused"

    await eventually(is_held)
    await client.resume(KIND, "tenant-7")
    await ended(rows, 3)


async def test_a_rate_lets_a_burst_through_and_then_one_by_one(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    for _ in range(2):
        await start(scripted(echo, rate=Rate(10, per=1)))
    await client.enqueue_many(KIND, [{"n": n} for n in range(30)])
    await ended(rows, 30)
    [row] = await rows.query(
        "SELECT extract(epoch FROM max(claimed_at) - min(claimed_at)) AS seconds FROM jsworker.jobs"
    )
    assert row["seconds"] >= 1.95  # ten at once, twenty more at ten a second


@pytest.mark.parametrize("limit", [None, Limit(1), Limit(1_000)], ids=["rate", "one at once", "many at once"])
async def test_tokens_are_used_as_they_come_back_and_not_once_a_scan(
    client: JobClient,
    rows: Rows,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    limit: Limit | None,
) -> None:
    processor = scripted(echo, limit=limit, rate=Rate(20, per=1))
    await start(
        processor, with_settings=make_settings(scan_interval=600.0, stale_threshold=3600.0, ack_wait=7200.0)
    )
    await client.enqueue_many(KIND, [{}] * 60)
    await ended(rows, 60)  # forty of them each with a token that came back


async def test_a_paused_kind_rests_and_goes_on(client: JobClient, rows: Rows, start: StartWorker) -> None:
    running = await start(scripted(echo))
    await client.pause(KIND, reason="maintenance")
    [paused] = await running.events.told("limit.paused")
    assert (paused["kind"], paused["key"]) == (KIND, "")
    await client.enqueue(KIND, {})
    [consumer] = running.worker._components.pipeline.consumers
    assert consumer.room() == 0
    [row] = await rows.query("SELECT status, attempts FROM jsworker.jobs")
    assert (row["status"], row["attempts"]) == ("queued", 0)
    await client.resume(KIND)
    await ended(rows, 1)
    assert await running.events.told("limit.resumed")


async def test_a_job_may_pause_its_key(client: JobClient, rows: Rows, start: StartWorker) -> None:
    tries: list[str] = []

    async def process(job: Job[Any]) -> None:
        tries.append(job.payload["tenant"])
        if len(tries) == 1:
            raise Retry(3600, "429", pause="key")

    processor = scripted(process, limit=Limit(1, key="tenant"))
    running = await start(processor)
    await client.enqueue(type(processor), {"tenant": "a"})
    [paused] = await running.events.told("limit.paused")
    assert (paused["key"], paused["seconds"]) == ("a", 3600)
    other = await client.enqueue(type(processor), {"tenant": "a"})
    await running.events.told("job.held")
    [row] = await rows.query("SELECT held_by FROM jsworker.jobs WHERE id = %s", other.id)
    assert row["held_by"] == "paused"
    await client.enqueue(type(processor), {"tenant": "b"})
    await ended(rows, 1)
    _, limit = await client.limits.list()
    assert (limit["key"], limit["held"], limit["paused_by"]) == ("a", 1, running.worker.id)
    assert limit["reason"].endswith(": 429")
    assert tries == ["a", "b"]


async def test_the_code_of_the_worker_that_started_last_wins(rows: Rows, start: StartWorker) -> None:
    numbers = "SELECT max_running, rate, per, set_by FROM jsworker.limits"
    first = await start(scripted(echo, limit=Limit(2), rate=Rate(50, per=60)))
    assert tuple((await rows.query(numbers))[0].values()) == (2, 50, 60.0, "code")
    assert await first.events.told("limit.changed")
    await start(scripted(echo, limit=Limit(3)))
    assert tuple((await rows.query(numbers))[0].values()) == (3, None, None, "code")
    same = await start(scripted(echo, limit=Limit(3)))
    assert same.events.of("limit.changed") == []
    await start(scripted(echo))
    assert tuple((await rows.query(numbers))[0].values()) == (None, None, None, None)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"limit": 2}, "limit=2 of kind scripted"),
        ({"rate": 2}, "rate=2 of kind scripted"),
        ({"limit": Limit(2, key="a"), "rate": Rate(2, key="b")}, "must be the same: a job has one key"),
        ({"limit": Limit(2, key="a"), "rate": Rate(2)}, "limit key='a' and rate key=None must be the same"),
    ],
)
async def test_limits_that_cannot_be_are_refused_at_the_start(
    start: StartWorker, attributes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says.replace("(", r"\(")):
        await start(scripted(echo, **attributes))


async def test_a_worker_that_ends_wakes_what_its_last_run_has_freed(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    release = asyncio.Event()

    async def process(_: Job[Any]) -> None:
        await release.wait()

    running = await start(scripted(process, limit=Limit(1)))
    await client.enqueue(KIND, {})
    await running.events.told("job.started")
    held = await client.enqueue(KIND, {})
    await running.events.told("job.held")
    ending = asyncio.create_task(running.worker.close())
    await running.events.told("worker.draining")
    release.set()
    await ending
    row = await rows.job(held.id)
    assert (row["status"], row["held_by"], row["attempts"]) == ("queued", None, 0)


@pytest.mark.parametrize("limited", [True, False])
async def test_messages_of_a_limited_kind_do_not_wait_for_the_runs_before_them(
    client: JobClient,
    rows: Rows,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    *,
    limited: bool,
) -> None:
    """Else what is held of some keys, which needs no message, would take each slot that falls free."""
    gate = Gate()
    processor = scripted(gate.process, limit=Limit(1, key="tenant") if limited else None)
    calm = make_settings(concurrency=1, heartbeat_interval=60.0, stale_threshold=3600.0, ack_wait=7200.0)
    running = await start(processor, with_settings=calm)
    running.expects_short_runs(KIND)
    await client.enqueue_many(type(processor), [{"tenant": f"t-{n}"} for n in range(6)])
    pipeline = running.worker._components.pipeline
    consumer = pipeline.of_kind[KIND]

    async def all_but_one_wait() -> None:
        assert pipeline.slots.waiting(consumer) == 5

    await eventually(all_but_one_wait)
    assert consumer.waiting() == (0 if limited else 5)
    gate.open()
    await ended(rows, 6)


async def start_with_held_jobs(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker, number: int
) -> tuple[Running, asyncio.Event]:
    """Start a worker with two slots whose limit was just raised; the event lets its jobs end."""
    release = asyncio.Event()

    async def process(_: Job[Any]) -> None:
        await release.wait()

    settings = make_settings(concurrency=2, scan_interval=600.0, stale_threshold=3600.0, ack_wait=7200.0)
    running = await start(scripted(process, limit=Limit(100)), with_settings=settings)
    await client.enqueue_many("elsewhere", [{}] * number, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET kind = %s, run_at = NULL, held_by = 'limit', held_at = now(),"
        " limit_key = '', queued_at = now() - interval '1 hour' WHERE kind = 'elsewhere'",
        KIND,
    )
    return running, release


async def test_no_more_held_jobs_are_claimed_than_there_is_room_for(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    """The message of a new job brings jobs that were held before it."""
    running, release = await start_with_held_jobs(client, rows, make_settings, start, 60)
    await client.enqueue_many(KIND, [{}] * 2)
    await running.events.told("job.started", times=2)
    in_flight = running.worker._context.in_flight

    async def every_claim_is_decided() -> None:
        assert not in_flight.claiming

    await eventually(every_claim_is_decided)
    assert len(in_flight.runs) == 2
    assert not running.events.of("job.released")
    release.set()
    await ended(rows, 62)


async def test_held_jobs_of_many_keys_are_not_locked_all_at_once(
    client: JobClient,
    rows: Rows,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jsworker.worker.pipeline.intake._MOST_LOCKED", 8)
    admit, asked = admission.admit, list[tuple[int, int]]()

    async def counted(*args: Any, keys: Collection[str] = (), most: int, **values: Any) -> Any:
        asked.append((len(keys), most))
        return await admit(*args, keys=keys, most=most, **values)

    keys = [f"t{n}" for n in range(7)]
    running = await start(
        scripted(echo, limit=Limit(9, key="tenant")), with_settings=make_settings(concurrency=4)
    )
    pipeline = running.worker._components.pipeline
    async with pipeline.states[KIND].admitting:
        await client.enqueue_many("elsewhere", [{}] * 7, delay=3600)
        await rows.query(
            "UPDATE jsworker.jobs SET kind = %s, run_at = NULL, held_by = 'limit', held_at = now(),"
            " limit_key = 't' || (SELECT count(*) FROM jsworker.jobs AS o WHERE o.id < jobs.id)",
            KIND,
        )
        monkeypatch.setattr(admission, "admit", counted)
        task = asyncio.create_task(pipeline._admit(pipeline.of_kind[KIND], keys))
        await asyncio.sleep(0)
    await task
    assert asked[:2] == [(2, 4), (2, 2)]
    await ended(rows, 7)


async def test_freed_keys_that_wait_for_an_admission_get_the_room_that_it_leaves(
    client: JobClient,
    rows: Rows,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wake_none(*_: object) -> None:
        """The second admission would find nothing held if the first one's wake were faster."""

    monkeypatch.setattr("jsworker.worker.pipeline.intake.wake_held", wake_none)
    running, release = await start_with_held_jobs(client, rows, make_settings, start, 6)
    pipeline = running.worker._components.pipeline
    async with pipeline.states[KIND].admitting:
        twice = [asyncio.create_task(pipeline._admit(pipeline.of_kind[KIND], [""])) for _ in range(2)]
        await asyncio.sleep(0)  # both have found room for two
    await asyncio.gather(*twice)
    assert len(running.worker._context.in_flight.runs) == 2
    release.set()
    await ended(rows, 6)
    assert not running.events.of("job.released")
