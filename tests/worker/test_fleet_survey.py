"""What waits is asked without harm, and shown as far as it is known."""

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jsworker import Every, JobClient, Limit
from jsworker.core.clock import boottime
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workflows import advance
from jsworker.stream.jetstream import Stream
from jsworker.telemetry.figures import packed, unpacked
from jsworker.telemetry.metrics import of_fleet
from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS, Fleet
from jsworker.worker.maintenance import fleet_survey, throttled_scan
from jsworker.worker.maintenance.fleet_survey import FleetSurvey
from tests.support.contexts import make_context
from tests.support.proxy import Proxy, proxied
from tests.worker.rows import Rows

KINDS = ["here", "idle"]


@pytest.fixture
async def cut_off(settings: Settings) -> AsyncIterator[tuple[Proxy, Stream]]:
    """A stream whose server can be made silent."""
    async with proxied(settings.nats_url) as (proxy, url):
        stream = Stream(
            settings.model_copy(update={"nats_url": url}),
            installation_id=None,
            events=Events(),
            client_name="test",
        )
        await stream.connect()
        await stream.ensure(KINDS)
        yield proxy, stream
        await stream.close()


async def test_a_silent_stream_hides_nothing_of_the_table(
    client: JobClient, database: Database, cut_off: tuple[Proxy, Stream], rows: Rows
) -> None:
    proxy, stream = cut_off
    await client.enqueue_many("here", [{}] * 3)
    await client.enqueue("elsewhere", {}, delay=60)
    await register(rows, ["elsewhere"])
    await rows.query("UPDATE jsworker.jobs SET queued_at = now() - interval '1 h' WHERE kind = 'here'")
    survey = FleetSurvey(make_context(database, stream=stream, kinds=dict.fromkeys(KINDS)))
    assert survey.latest is None
    await survey.step()
    found = survey.latest
    assert found is not None
    assert found.queues["here"].waiting.jobs == {"scheduled": 0, "queued": 3, "processing": 0}
    assert found.queues["here"].waiting.oldest_seconds == pytest.approx(3600, abs=60)
    assert found.queues["elsewhere"].waiting.jobs["scheduled"] == 1
    assert found.queues["elsewhere"].drift is None  # nobody works on it: no consumer
    assert found.queues["idle"].drift == 0

    proxy.black_hole()
    survey._pace.hurry()  # the machine may be slow
    await survey.step()
    found = survey.latest
    assert found is not None
    assert found.queues["here"].waiting.jobs["queued"] == 3
    assert found.queues["here"].drift is None


async def register(rows: Rows, kinds: list[str]) -> None:
    await rows.query(
        "INSERT INTO jsworker.workers"
        " (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)"
        " VALUES ('other-1-0badf00d', 'other', 1, %s, 1, '1', '5 s', 'stopped')",
        kinds,
    )


async def test_kinds_that_no_worker_is_for_are_counted_together(
    client: JobClient, database: Database, cut_off: tuple[Proxy, Stream], rows: Rows
) -> None:
    """Producers invent kinds as they like; one INSERT can bring hundreds of thousands."""
    _, stream = cut_off
    junk = 20_000
    await rows.query(
        """
        INSERT INTO jsworker.jobs (
          id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at)
        SELECT gen_random_uuid(), 'junk-' || n, '{}', 'queued', 1, n <= 100, now(), now() - interval '1 h'
        FROM generate_series(1, %s) AS n
        """,
        junk,
    )
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)"
        " VALUES (gen_random_uuid(), 'a-later-one', '{}', 'scheduled', now() + interval '1 h')"
    )
    await client.enqueue("here", {})
    await register(rows, ["elsewhere", *(f"served-{n:03}" for n in range(300))])
    survey = FleetSurvey(make_context(database, stream=stream, kinds=dict.fromkeys(KINDS)))
    await survey.step()
    found = survey.latest
    assert found is not None
    assert list(found.queues)[:3] == [*KINDS, "elsewhere"]
    assert len(found.queues) == MOST_KINDS + 1
    others = found.queues[OTHER_KINDS]
    assert others.waiting.jobs == {"scheduled": 1, "queued": junk, "processing": 0}
    assert (others.waiting.to_publish, others.drift) == (100, None)
    assert others.waiting.oldest_seconds == pytest.approx(3600, abs=60)
    assert found.queues["here"].waiting.jobs["queued"] == 1
    registry = CollectorRegistry()
    registry.register(Given(found))
    assert len(unpacked(packed(registry))) > 0


class Given(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        yield from of_fleet(self._fleet)


async def test_limits_and_schedules_are_shown_by_kind(
    client: JobClient, database: Database, cut_off: tuple[Proxy, Stream]
) -> None:
    _, stream = cut_off
    await client.limits.set("here", Limit(3))
    await client.schedules.add("nightly", "here", Every(days=1))
    survey = FleetSurvey(make_context(database, stream=stream, kinds=dict.fromkeys(KINDS)))
    await survey.step()
    found = survey.latest
    assert found is not None
    samples = {
        (family.name, sample.labels.get("kind")): sample.value
        for family in of_fleet(found)
        for sample in family.samples
    }
    assert samples["jsworker_limit_running_jobs", "here"] == 0
    assert samples["jsworker_limit_max_running_jobs", "here"] == 3
    assert samples["jsworker_limit_full_keys", "here"] == 0
    assert samples["jsworker_schedule_lag_seconds", "here"] == 0
    assert ("jsworker_limit_max_running_jobs", "idle") not in samples
    assert ("jsworker_schedule_lag_seconds", "idle") not in samples
    assert samples["jsworker_workflows_left_seconds", None] == 0


async def test_a_paused_kind_is_shown_until_it_goes_on(
    client: JobClient, database: Database, cut_off: tuple[Proxy, Stream], rows: Rows
) -> None:
    _, stream = cut_off
    await client.enqueue("unserved", {})
    survey = FleetSurvey(make_context(database, stream=stream, kinds=dict.fromkeys(KINDS)))

    async def paused() -> dict[str, float]:
        survey._pace.hurry()
        await survey.step()
        assert survey.latest is not None
        [family] = [one for one in of_fleet(survey.latest) if one.name == "jsworker_kind_paused"]
        return {sample.labels["kind"]: sample.value for sample in family.samples}

    assert await paused() == {"here": 0, "idle": 0}
    await client.pause("here")
    await client.pause("unserved")
    await client.pause("idle", "key")
    assert await paused() == {"here": 1, "idle": 0}
    await client.resume("here")
    await client.pause("idle", until=timedelta(minutes=1))
    assert await paused() == {"here": 0, "idle": 1}
    await rows.query("UPDATE jsworker.limits SET paused_until = now() - interval '1 s' WHERE kind = 'idle'")
    assert await paused() == {"here": 0, "idle": 0}


async def test_for_how_long_workflows_are_left_is_seen_from_survey_to_survey(
    client: JobClient,
    database: Database,
    cut_off: tuple[Proxy, Stream],
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, stream = cut_off
    present = boottime()
    monkeypatch.setattr(fleet_survey, "boottime", lambda: present)
    survey = FleetSurvey(make_context(database, stream=stream, kinds=dict.fromkeys(KINDS)))

    async def left_seconds() -> float:
        survey._pace.hurry()
        await survey.step()
        assert survey.latest is not None
        return survey.latest.workflows_left_seconds

    async def with_an_end(name: str) -> UUID:
        async with client.workflow(name) as flow:
            flow.job("here", {})
            flow.job("here", {})
        [first, _] = await rows.query("SELECT id FROM jsworker.batches WHERE workflow = %s", flow.id)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now(), needs_publish = false"
            " WHERE batch_id = %s",
            first["id"],
        )
        batch: UUID = first["id"]
        return batch

    first = await with_an_end("one")
    assert await left_seconds() == 0
    present += 40
    await with_an_end("two")
    assert await left_seconds() == 40
    await advance(database, [first])
    present += 10
    assert await left_seconds() == 10


async def test_a_count_that_takes_too_long_is_not_repeated_soon(
    settings: Settings, cut_off: tuple[Proxy, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttled_scan, "_QUICK_SECONDS", 0.02)
    _, stream = cut_off
    async with proxied(settings.database_url) as (proxy, url):
        slow = Database(url, statement_timeout=0.2)
        survey = FleetSurvey(make_context(slow, stream=stream, kinds=dict.fromkeys(KINDS)))
        proxy.black_hole()
        await survey.step()
        proxy.restore()
        await survey.step()  # rests
        assert survey.latest is None
        await slow.close()
