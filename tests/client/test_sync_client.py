"""The client for code that waits: all that JobClient can, under the same names, with the same arguments."""

import asyncio
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, get_overloads

import psycopg
import pytest

import jsworker
from jsworker import Every, JobClient, JobHandle, Limit, SyncJobClient, SyncJobHandle
from jsworker.client.limits import Limits
from jsworker.client.schedules import Schedules
from jsworker.client.selected_jobs import SelectedJobs
from jsworker.client.sync_parts import SyncFlow, SyncLimits, SyncSchedules, SyncSelectedJobs, SyncWorkflows
from jsworker.client.workflows import Flow, Workflows
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import (
    DatabaseUnavailable,
    InvalidPayload,
    JobFailed,
    JobNotFound,
    SettingsError,
    TransitionRefused,
    UsageError,
    WorkflowNotFound,
)
from jsworker.core.job import kinds_of_slot
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import Enqueued
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.processors import KIND, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

NOBODY = "nats://127.0.0.1:1"
FACES: dict[type[Any], type[Any]] = {
    JobClient: SyncJobClient,
    JobHandle: SyncJobHandle,
    Schedules: SyncSchedules,
    Limits: SyncLimits,
    Workflows: SyncWorkflows,
    Flow: SyncFlow,
    SelectedJobs: SyncSelectedJobs,
}
WAITING = {"__aenter__": "__enter__", "__aexit__": "__exit__"}


def public(face: type[Any]) -> dict[str, Any]:
    """Return what a class has by name, but for what every class has."""
    found = {name: inspect.getattr_static(face, name) for name in dir(face) if not hasattr(Enqueued, name)}
    named = {WAITING.get(name, name): value for name, value in found.items()}
    return {
        name: value for name, value in named.items() if not name.startswith("_") or name in WAITING.values()
    }


def signatures(function: Any) -> list[tuple[list[inspect.Parameter], Any]]:
    """Return the parameters of a function and of its overloads, and what each returns."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    each = [inspect.signature(one) for one in (plain, *get_overloads(plain))]
    return [(list(one.parameters.values()), waiting_type(one.return_annotation)) for one in each]


def waiting_type(annotation: Any) -> str:
    """Return a type as text, as its counterpart that waits calls it."""
    text = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    for one, other in FACES.items():
        if other.__name__ not in text:
            text = text.replace(f"{one.__module__}.", "").replace(one.__name__, other.__name__)
            text = text.replace(f"{other.__module__}.", "")
    return text.replace(f"{SyncJobHandle.__module__}.", "")


@pytest.mark.parametrize(("face", "waits"), FACES.items(), ids=[face.__name__ for face in FACES])
def test_both_faces_have_the_same_names_and_arguments(face: type[Any], waits: type[Any]) -> None:
    ours, theirs = public(face), public(waits)
    assert sorted(theirs) == sorted(ours)
    for name, function in ours.items():
        if isinstance(function, property):
            assert isinstance(theirs[name], property), name
            assert signatures(theirs[name].fget)[0][1] == signatures(function.fget)[0][1], name
        elif name != "of":  # how a client makes a handle is its own affair
            assert signatures(theirs[name]) == signatures(function), name


def test_it_is_part_of_the_package() -> None:
    assert {"SyncJobClient", "SyncJobHandle"} <= set(jsworker.__all__)


@pytest.fixture
def sync_client(settings: Settings) -> Iterator[SyncJobClient]:
    client = SyncJobClient(settings)
    yield client
    client.close()


async def test_it_enqueues_and_waits_for_results(
    sync_client: SyncJobClient, start: StartWorker, rows: Rows
) -> None:
    async def work(job: Any) -> Any:
        if job.payload == {"n": -1}:
            raise jsworker.Fail("on purpose")
        return job.payload

    await start(scripted(work))

    def use() -> None:
        job = sync_client.enqueue(KIND, {"n": 1}, unique_key="one")
        assert isinstance(job, SyncJobHandle)
        assert (job.result(60), sync_client.result(job.id), job.created) == ({"n": 1}, {"n": 1}, True)
        assert (job.id, True) == job == pickle.loads(pickle.dumps(job))  # noqa: S301 -- our own
        with pytest.raises(RuntimeError, match=r"client\.result"):
            SyncJobHandle(*job).result()
        many = sync_client.enqueue_many(
            KIND, ({"n": n} for n in range(3)), unique_keys=["a", "a", None], max_attempts=2
        )
        assert [each.created for each in many] == [True, False, True]
        assert [each.result(timedelta(seconds=60)) for each in many] == [{"n": 0}, {"n": 0}, {"n": 2}]
        with pytest.raises(JobFailed, match="on purpose"):
            sync_client.enqueue(KIND, {"n": -1}).result(60)
        late = sync_client.enqueue(KIND, {}, delay=3600)
        with pytest.raises(TimeoutError, match="has not ended within"):
            late.result(0.1)
        with pytest.raises(TypeError, match="payloads must be a list"):
            sync_client.enqueue_many(KIND, {"n": 1})
        with pytest.raises(TypeError, match="there is no such argument"):
            sync_client.enqueue(KIND, {}, dealy=1)  # type: ignore[call-overload] # what it is about
        with pytest.raises(InvalidPayload):
            sync_client.enqueue(KIND, {"n": "x" * 2**20})

    await asyncio.to_thread(use)
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 5


async def test_operators_calls_wait_too(sync_client: SyncJobClient, rows: Rows, client: JobClient) -> None:
    ahead = datetime.now(UTC) + timedelta(days=1)
    job = await client.enqueue(KIND, {}, delay=3600)
    failed = await client.enqueue(KIND, {})
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'failed', attempts = 1, errors = 1, finished_at = now(),"
        " needs_publish = false, failure_reason = 'attempts' WHERE id = %s",
        failed.id,
    )

    def use() -> None:
        assert sync_client.get(job.id).kind == KIND
        with pytest.raises(JobNotFound):
            sync_client.get("no id")
        assert [row.id for row in sync_client.list(kind=KIND, status="scheduled", limit=5)] == [job.id]
        assert (sync_client.timeline(job.id), sync_client.steps(job.id)) == ([], [])
        sync_client.set_priority(job.id, "high")
        assert sync_client.get(job.id).priority == "high"
        with pytest.raises(TransitionRefused):
            sync_client.clear_and_reenqueue(job.id, "why not")
        assert sync_client.cancel(job.id).cancelled == [job.id]
        sync_client.retry(failed.id, actor="ann")
        assert sync_client.get(failed.id).status == "queued"
        [action] = sync_client.audit()
        assert (action.actor, action.action, action.changed) == ("ann", "retry", 1)
        queued = sync_client.select(status="queued", kind=KIND)
        assert queued.count() == (1, True)
        assert queued.set_priority("low").changed == queued.cancel().changed == 1
        later = sync_client.enqueue(KIND, {}, delay=60)
        sync_client.reschedule(later.id, ahead)
        scheduled = sync_client.select(status="scheduled", since=ahead - timedelta(days=2))
        assert scheduled.reschedule(ahead + timedelta(days=1)).changed == 1
        assert sync_client.select(status="cancelled").retry().changed == 2
        assert sync_client.select(status="processing").clear("why").matched == 0
        assert len(sync_client.audit(limit=3)) == 3
        assert isinstance(sync_client.publish_pending(), int)
        until = sync_client.pause(KIND, until=ahead, reason="night")
        assert until is not None
        assert abs(until - ahead) < timedelta(minutes=1)
        sync_client.resume(KIND)

        sync_client.limits.set(KIND, Limit(3))
        assert sync_client.limits.numbers(KIND).max_running == 3
        assert [row["kind"] for row in sync_client.limits.list()] == [KIND]
        sync_client.limits.pause(KIND, "a", until=None, reason=None)
        sync_client.limits.resume(KIND, "a")
        sync_client.limits.reset(KIND)

        due = sync_client.schedules.add("hourly", KIND, Every(hours=1))
        assert [row["next_at"] for row in sync_client.schedules.list()] == [due]
        sync_client.schedules.pause("hourly")
        assert sync_client.schedules.resume("hourly") >= due
        now = sync_client.schedules.run_now("hourly")
        assert isinstance(now, SyncJobHandle)
        assert sync_client.get(now.id).kind == KIND
        sync_client.schedules.remove("hourly")
        assert sync_client.schedules.list() == []

    await asyncio.to_thread(use)


def test_workers_are_drained_too(sync_client: SyncJobClient) -> None:
    for call in (sync_client.drain_worker, sync_client.undrain_worker):
        with pytest.raises(TransitionRefused, match="no worker has id gone"):
            call("gone", actor="ann")


async def test_workflows_wait_too(sync_client: SyncJobClient, start: StartWorker) -> None:
    await start(scripted(echo))

    def use() -> None:
        with sync_client.workflow("nightly") as flow:
            parts = flow.batch(KIND, [{"n": 1}, {"n": 2}], name="parts")
            flow.job(KIND, {"n": 3}, after=parts, name="last")
        assert flow.result(60) == {"n": 3}
        assert sync_client.workflows.get(flow.id)["name"] == flow.name == "nightly"
        assert [row["id"] for row in sync_client.workflows.list()] == [flow.id]
        for call in (sync_client.workflows.cancel, sync_client.workflows.retry):
            with pytest.raises(TransitionRefused):
                call(flow.id)
        with pytest.raises(WorkflowNotFound):
            sync_client.workflows.get("none")
        with pytest.raises(ValueError, match="there is a node"), sync_client.workflow("broken") as broken:
            assert broken.job(KIND, {}, name="a") != broken.job(KIND, {}, name="a")
        assert len(sync_client.workflows.list()) == 1
        left = sync_client.workflow("left")
        sync_client.close()
        sync_client.open()
        with pytest.raises(RuntimeError, match="begun before its client was closed"):
            left.__enter__()

    await asyncio.to_thread(use)


def test_payloads_and_keys_are_read_in_the_thread_of_the_caller(sync_client: SyncJobClient) -> None:
    def payloads() -> Iterator[dict[str, str]]:
        for _ in range(2):
            names.append(threading.current_thread().name)
            yield {}

    def keys() -> Iterator[str]:
        for payload, key in zip(payloads(), "ab", strict=True):
            assert payload == {}
            yield key

    names: list[str] = []
    assert len(sync_client.enqueue_many(KIND, payloads())) == 2
    unique_keys: Any = keys()
    assert len(sync_client.enqueue_many(KIND, [{}, {}], unique_keys=unique_keys)) == 2
    assert names == [threading.current_thread().name] * 4


def stored(settings: Settings) -> int:
    with psycopg.connect(settings.database_dsn()) as connection:
        found = connection.execute("SELECT count(*) FROM jsworker.jobs").fetchone()
    assert found is not None
    return int(found[0])


def test_it_opens_by_itself_and_closes_once(settings: Settings) -> None:
    client = SyncJobClient(settings)
    assert client.unpublished_because is None
    client.close()  # was never open
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.enqueue(KIND, {})
    with client as opened:
        assert opened is client
        client.enqueue(KIND, {})
        client.open()  # twice is as good as once
    client.close()
    for call in (client.publish_pending, client.schedules.list, lambda: client.workflow("a")):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()
    assert stored(settings) == 1


def test_it_says_how_it_is_made(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"SyncJobClient takes Settings, not str"):
        SyncJobClient("postgresql://")  # type: ignore[arg-type] # what it is about
    with pytest.raises(SettingsError, match="JSWORKER_DATABASE_URL"):
        SyncJobClient.from_env()
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    with SyncJobClient.from_env(max_payload_bytes=10) as client, pytest.raises(InvalidPayload):
        client.enqueue(KIND, "longer than ten bytes")


async def test_on_an_event_loop_it_names_the_client_to_use(settings: Settings) -> None:
    client = SyncJobClient(settings)
    flow = await asyncio.to_thread(client.workflow, "a")
    options: EnqueueOptions = {}
    calls: list[Callable[[], Any]] = [
        client.open,
        client.close,
        client.__enter__,
        flow.__enter__,
        client.limits.list,
        lambda: client.enqueue(KIND, {}, **options),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="use JobClient and await it"):
            call()
    await asyncio.to_thread(client.close)


def test_the_context_of_the_caller_goes_with_the_call(sync_client: SyncJobClient) -> None:
    late = sync_client.enqueue(KIND, {}, delay=3600)
    token = kinds_of_slot.set(frozenset({KIND}))
    try:
        with pytest.raises(UsageError, match="inside a job of this worker"):
            late.result(60)
    finally:
        kinds_of_slot.reset(token)


@pytest.mark.parametrize("given", [{}, {"nats_url": NOBODY}], ids=["unset", "away"])
async def test_without_nats_workers_publish(
    settings: Settings, start: StartWorker, monkeypatch: pytest.MonkeyPatch, *, given: dict[str, Any]
) -> None:
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.3)
    await start(scripted(echo))
    own = Settings(
        database_url=settings.database_dsn(),
        stream=settings.stream,
        subject_prefix=settings.subject_prefix,
        **given,
    )
    told = Recorder()

    def use() -> None:
        with SyncJobClient(own) as client:
            client.events.on("*", told)
            jobs = [client.enqueue(KIND, {"n": 0}), *client.enqueue_many(KIND, [{"n": 1}, {"n": 2}])]
            assert [job.result(60) for job in jobs] == [{"n": 0}, {"n": 1}, {"n": 2}]
            assert client.publish_pending() == 0
            reason = "127.0.0.1:1" if given else "JSWORKER_NATS_URL is not set"
            assert reason in str(client.unpublished_because)
            assert client.workflow("a").name == "a"

    await asyncio.to_thread(use)
    assert given or not told.events


async def test_jobclient_needs_no_nats_either(settings: Settings, start: StartWorker) -> None:
    await start(scripted(echo))
    own = settings.model_copy()
    own.__pydantic_fields_set__.discard("nats_url")
    async with JobClient(own) as client:
        assert client.unpublished_because == "JSWORKER_NATS_URL is not set"
        assert await (await client.enqueue(KIND, {"n": 1})).result(60) == {"n": 1}
        assert await client.publish_pending() == 0


async def test_events_outlive_what_they_tell_of(make_settings: Callable[..., Settings]) -> None:
    told = Recorder()

    def use() -> None:
        client = SyncJobClient(make_settings(nats_url=NOBODY))
        client.events.on("worker.degraded", told)
        for _ in range(2):
            with client:
                client.enqueue(KIND, {})

    await asyncio.to_thread(use)
    assert len(told.of("worker.degraded")) >= 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
async def test_a_listener_that_raises_does_not_end_the_thread(
    make_settings: Callable[..., Settings],
    capsys: pytest.CaptureFixture[str],
    *,
    error: type[BaseException],
) -> None:
    def leaving(_: object) -> None:
        raise error(3)

    def use() -> None:
        with SyncJobClient(make_settings(nats_url=NOBODY)) as client:
            client.events.on("worker.degraded", leaving)
            client.close()
            client.open()
            assert client.enqueue(KIND, {}).created

    await asyncio.to_thread(use)
    says = f".leaving of event worker.degraded raised {error.__name__}\n"
    assert says in capsys.readouterr().err


async def test_postgresql_may_be_away_and_come_back(
    make_settings: Callable[..., Settings], database_url: str
) -> None:
    async with proxied(database_url) as (proxy, url):
        proxy.cut()
        client = SyncJobClient(make_settings(database_url=url))
        with pytest.raises(DatabaseUnavailable):
            await asyncio.to_thread(client.enqueue, KIND, {})
        proxy.restore()
        late = await asyncio.to_thread(client.enqueue, KIND, {}, delay=3600)  # opens at last
        proxy.cut()
        with pytest.raises(DatabaseUnavailable):
            await asyncio.to_thread(client.get, late.id)
        refused = proxy.refused
        waiting = asyncio.create_task(asyncio.to_thread(client.result, late.id, 60))

        async def asks_in_vain() -> None:
            assert proxy.refused > refused

        await eventually(asks_in_vain)
        proxy.restore()
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(
                "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now() WHERE id = %s", [late.id]
            )
        with pytest.raises(jsworker.JobCancelled):
            await waiting
        assert (await asyncio.to_thread(client.get, late.id)).status == "cancelled"
        await asyncio.to_thread(client.close)
