"""What jobs hold is stored encrypted, read by those who have the keys, and quoted nowhere."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, field_validator
from sqlalchemy import create_engine, text

from jsworker import Every, Fail, JobClient, Retry, Snooze, SyncJobClient, enqueue_statement
from jsworker.core.contents import key_of_content
from jsworker.core.errors import ContentRefused, InvalidJson, InvalidPayload, JobFailed, KeyMissing
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import settling
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.test_contents import NEW, OLD, Reverse, text_of_keys
from tests.worker.perilous import InSteps, Perilous
from tests.worker.processors import KIND, LATER, Scripted, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


class Parent(JobProcessor[dict[str, str]]):
    """Enqueues a job with its own payload."""

    kind = "parent"

    async def process(self, job: Job[dict[str, str]]) -> str:
        return str(await job.enqueue(KIND, job.payload))


class Keys(str, Enum):  # noqa: UP042 -- a StrEnum is formatted by its value
    HOME = "home"


CANARY = "c4n4ry"
Make = Callable[..., Settings]


@pytest.fixture
def encrypted(make_settings: Make) -> Settings:
    return make_settings(encryption_keys=text_of_keys(old=OLD))


@pytest.fixture
async def sealed(encrypted: Settings) -> AsyncIterator[JobClient]:
    """A client that encrypts."""
    async with JobClient(encrypted) as client:
        yield client


async def whole_database(rows: Rows) -> str:
    """Return every row of every table of ours as text."""
    tables = await rows.query("SELECT tablename FROM pg_tables WHERE schemaname = 'jsworker'")
    found = []
    for table in tables:
        name = f'jsworker."{table["tablename"]}"'
        every_row = f"SELECT t::text AS row FROM {name} AS t"  # noqa: S608 -- a name of the catalogue
        cursor = await rows.connection.execute(every_row.encode())
        found += [str(row["row"]) for row in await cursor.fetchall()]
    return "\n".join(found)


async def full(job: Job[Any]) -> Any:
    """Store something in each place that a job has."""
    if job.checkpoint is None:
        await job.save_checkpoint({"at": job.payload["secret"]})
        await job.step("first", echo, job)
        raise Retry(0)
    before = await job.step("first", echo, job)
    return {"payload": job.payload, "checkpoint": job.checkpoint, "step": before}


async def test_every_place_is_encrypted_and_read_again(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(full), with_settings=encrypted)
    payload = {"secret": f"{CANARY} ✓ \\ \t"}
    job = await sealed.enqueue(KIND, payload)
    found = {"payload": payload, "checkpoint": {"at": payload["secret"]}, "step": payload}
    assert await job.result(60) == found
    assert await sealed.result(job.id, 60) == found
    row = await rows.job(job.id)
    [step] = await rows.query("SELECT result FROM jsworker.job_steps")
    for value in (row["payload"], row["checkpoint"], row["result"], step["result"]):
        assert key_of_content(value) == "aes-gcm old"
    assert CANARY not in await whole_database(rows)
    assert CANARY not in str(running.events.events)
    got = await sealed.get(job.id)
    assert (got.payload, got.checkpoint, got.result) == (payload, found["checkpoint"], found)


async def test_without_the_keys_a_client_gets_no_content(
    sealed: JobClient, client: JobClient, encrypted: Settings, start: StartWorker
) -> None:
    await start(scripted(echo), with_settings=encrypted)
    job = await sealed.enqueue(KIND, {"secret": CANARY})
    await job.result(60)
    with pytest.raises(KeyMissing, match="is encoded with codec 'aes-gcm', which is not here"):
        await client.result(job.id, 60)
    assert CANARY not in str(await client.get(job.id))


async def test_keys_are_rotated_while_jobs_wait(
    sealed: JobClient, make_settings: Make, rows: Rows, start: StartWorker
) -> None:
    before = await sealed.enqueue_many(KIND, [{"n": number} for number in range(3)])
    rotated = make_settings(encryption_keys=text_of_keys(new=NEW, old=OLD))
    await start(scripted(echo), with_settings=rotated)
    async with JobClient(rotated) as client:
        after = await client.enqueue(KIND, {"n": 3})
        results = await asyncio.gather(*(client.result(job.id, 60) for job in [*before, after]))
    assert results == [{"n": number} for number in range(4)]
    keys = {key_of_content((await rows.job(job.id))["result"]) for job in [*before, after]}
    assert keys == {"aes-gcm new"}
    assert key_of_content((await rows.job(before[0].id))["payload"]) == "aes-gcm old"


async def test_plain_jobs_of_other_producers_run_beside_encrypted_ones_until_they_are_refused(
    client: JobClient, sealed: JobClient, make_settings: Make, rows: Rows, start: StartWorker
) -> None:
    [plain] = await rows.query("SELECT id FROM jsworker.enqueue(%s, '{\"n\": 1}')", KIND)
    first = await start(scripted(echo), with_settings=make_settings(encryption_keys=text_of_keys(old=OLD)))
    assert await sealed.result(plain["id"], 60) == {"n": 1}
    assert key_of_content((await rows.job(plain["id"]))["result"]) == "aes-gcm old"
    await first.end()

    async def failed_for_good(job_id: UUID) -> None:
        read = "SELECT status, failure_reason, attempts FROM jsworker.jobs WHERE id = %s"  # not the payload
        [row] = await rows.query(read, job_id)
        assert (row["status"], row["failure_reason"], row["attempts"]) == ("failed", "payload", 1)

    only = make_settings(encryption_keys=text_of_keys(old=OLD), encrypted_only=True)
    await start(scripted(echo), with_settings=only)
    refused = await client.enqueue(KIND, {"n": 2})
    row = await rows.becomes(refused.id, "failed")
    assert (row["failure_reason"], row["attempts"]) == ("payload", 1)
    assert "is not encrypted, and JSWORKER_ENCRYPTED_ONLY=true refuses that" in row["last_error"]
    for unread in ("1e5000", f"{'[' * 3_000}{']' * 3_000}"):
        [of_sql] = await rows.query("SELECT id FROM jsworker.enqueue(%s, %s::jsonb)", KIND, unread)
        await eventually(partial(failed_for_good, of_sql["id"]), seconds=60.0)
    assert await (await sealed.enqueue(KIND, {"n": 3})).result(60) == {"n": 3}


async def test_plain_contents_that_look_encoded_are_refused_and_end_their_job(
    client: JobClient, sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    alike = {"$codec": ["a", "b", "c"]}

    async def store(job: Job[Any]) -> Any:
        match job.payload:
            case {"in": "checkpoint"}:
                await job.save_checkpoint(alike)
            case {"in": "step"}:
                await job.step("first", return_alike)
        return alike

    async def return_alike() -> Any:
        return alike

    refused = 'an object with the one key "$codec" is reserved for encoded contents'
    with pytest.raises(InvalidJson, match=f"^{re.escape(f'payload: {refused}')}$"):
        await client.enqueue(KIND, alike)
    with pytest.raises(InvalidJson, match=rf"^payloads\[1\]: {re.escape(f'payload: {refused}')}$"):
        await client.enqueue_many(KIND, [{}, alike])
    running = await start(scripted(store))
    for place in ("checkpoint", "step", "result"):
        job = await client.enqueue(KIND, {"in": place}, max_attempts=1)
        row = await rows.becomes(job.id, "failed")
        assert refused in row["last_error"]
    [of_sql] = await rows.query('SELECT id FROM jsworker.enqueue(%s, \'{"$codec": ["a", "b", "c"]}\')', KIND)
    row = await rows.becomes(of_sql["id"], "failed")
    assert (row["failure_reason"], row["attempts"]) == ("payload", 1)
    await running.end()

    await start(scripted(echo), with_settings=encrypted)
    assert await (await sealed.enqueue(KIND, alike)).result(60) == alike


@pytest.mark.parametrize(
    "keys", [{}, {"encryption_keys": text_of_keys(new=NEW)}], ids=["no codec", "other keys"]
)
async def test_a_worker_without_the_key_burns_no_attempt(  # noqa: PLR0917 -- fixtures
    sealed: JobClient,
    make_settings: Make,
    encrypted: Settings,
    rows: Rows,
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, str],
) -> None:
    monkeypatch.setattr(settling, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(settling, "_LONGEST_WITHOUT_KEY_SECONDS", 0.1)
    monkeypatch.setattr(settling, "_MOST_SERVER_FAULTS", 2)
    job = await sealed.enqueue(KIND, {"secret": CANARY}, max_attempts=1)
    poor = await start(scripted(echo), with_settings=make_settings(**keys))
    await poor.events.told("job.released", times=4)
    [degraded] = [each for each in poor.events.of("worker.degraded") if each["what"] == "decryption"]
    assert degraded["reason"].endswith("is not here")
    row = await rows.job(job.id)
    assert (row["attempts"] - (row["status"] == "processing"), row["errors"], row["stalls"]) == (0, 0, 0)
    await poor.end()
    await start(scripted(echo), with_settings=encrypted)
    assert await job.result(60) == {"secret": CANARY}


async def swap_payloads(rows: Rows, one: UUID, other: UUID) -> None:
    await rows.query(
        "UPDATE jsworker.jobs AS j SET payload = o.payload FROM jsworker.jobs AS o "
        "WHERE (j.id, o.id) IN ((%s, %s), (%s, %s))",
        *(one, other, other, one),
    )


async def test_payloads_that_were_swapped_fail_both_jobs_at_once(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    one, other = await sealed.enqueue_many(KIND, [{"secret": CANARY}, {"secret": "y"}], delay=3600)
    await swap_payloads(rows, one.id, other.id)
    await rows.query("UPDATE jsworker.jobs SET run_at = now()")
    running = await start(scripted(echo), with_settings=encrypted)
    for job in (one, other):
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["attempts"]) == ("payload", 1)
        assert row["last_error"] == (
            f"payload of kind {KIND}, of job {job.id}: cannot be decoded with key 'old': "
            "it was changed, or belongs to another place"
        )
    with pytest.raises(JobFailed, match="it was changed, or belongs to another place"):
        await one.result(60)
    assert CANARY not in str(running.events.events) + await whole_database(rows)


@pytest.mark.parametrize("column", ["checkpoint", "step", "step in a TaskGroup"])
async def test_a_checkpoint_or_a_step_of_another_job_is_refused(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker, column: str
) -> None:
    async def stops(job: Job[Any]) -> Any:
        if job.checkpoint is None:
            await job.save_checkpoint(job.payload)
            await job.step("first", echo, job)
            raise Snooze(3600)
        if column == "step in a TaskGroup":
            async with asyncio.TaskGroup() as group:
                first = group.create_task(job.step("first", echo, job))
            return await first
        return await job.step("first", echo, job)

    await start(scripted(stops), with_settings=encrypted)
    one, other = await sealed.enqueue_many(KIND, [{"n": 1}, {"n": 2}])
    for job in (one, other):
        await rows.becomes(job.id, "scheduled")
    if column == "checkpoint":
        await rows.query(
            "UPDATE jsworker.jobs SET checkpoint = (SELECT checkpoint FROM jsworker.jobs WHERE id = %s) "
            "WHERE id = %s",
            *(other.id, one.id),
        )
    else:
        await rows.query(
            "UPDATE jsworker.job_steps SET result = "
            "(SELECT result FROM jsworker.job_steps WHERE job_id = %s) WHERE job_id = %s",
            *(other.id, one.id),
        )
    await rows.query("UPDATE jsworker.jobs SET run_at = now()")
    row = await rows.becomes(one.id, "failed")
    assert row["failure_reason"] == "payload"
    assert row["last_error"].startswith("checkpoint of" if column == "checkpoint" else "step first of")
    assert await other.result(60) == {"n": 2}


async def test_a_result_that_was_moved_is_refused(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    await start(scripted(echo), with_settings=encrypted)
    one, other = await sealed.enqueue_many(KIND, [{"n": 1}, {"n": 2}])
    await asyncio.gather(one.result(60), other.result(60))
    await rows.query("ALTER TABLE jsworker.jobs DISABLE TRIGGER USER")
    await rows.query(
        "UPDATE jsworker.jobs SET result = (SELECT result FROM jsworker.jobs WHERE id = %s) WHERE id = %s",
        *(other.id, one.id),
    )
    with pytest.raises(ContentRefused, match=r"^result of"):
        await one.result(60)


async def change_result(rows: Rows, job_id: UUID) -> None:
    changed = json.dumps({"$codec": ["aes-gcm", "old", "AAAA"]})
    await rows.query("ALTER TABLE jsworker.jobs DISABLE TRIGGER USER")
    await rows.query("UPDATE jsworker.jobs SET result = %s WHERE id = %s", changed, job_id)
    await rows.query("ALTER TABLE jsworker.jobs ENABLE TRIGGER USER")


@pytest.mark.parametrize("why", ["its key is missing", "it was changed"])
async def test_an_error_about_the_content_of_another_job_is_counted(  # noqa: PLR0917 -- fixtures
    sealed: JobClient, client: JobClient, encrypted: Settings, rows: Rows, start: StartWorker, why: str
) -> None:
    reader = client if why == "its key is missing" else sealed

    async def process(job: Job[Any]) -> Any:
        return await job.step("read", reader.result, UUID(job.payload["other"]), 60)

    running = await start(
        scripted(echo, kind="other"), scripted(process, backoff=LATER), with_settings=encrypted
    )
    other = await sealed.enqueue("other", {})
    await other.result(60)
    if why == "it was changed":
        await change_result(rows, other.id)
    job = await sealed.enqueue(KIND, {"other": str(other.id)})
    await running.events.told("job.error")
    row = await rows.becomes(job.id, "scheduled")
    assert (row["attempts"], row["errors"]) == (1, 1)
    assert running.events.of("worker.degraded") == []


class KeylessResults(Reverse):
    """Has no key for results."""

    def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
        if b'"result"' in bound_to:
            raise KeyMissing
        return super().encode(content, bound_to)


async def test_a_result_that_cannot_be_encoded_fails_its_attempt(settings: Settings, rows: Rows) -> None:
    running = Running(Worker([scripted(echo, backoff=LATER)], settings, codec=KeylessResults()))
    await running.worker.start()
    async with JobClient(settings, codec=KeylessResults()) as client:
        job = await client.enqueue(KIND, {"n": 1})
        row = await rows.becomes(job.id, "scheduled")
    assert (row["attempts"], row["errors"]) == (1, 1)
    words = row["last_error"].partition("\nTraceback ")[0]
    assert words == "A content is encoded with a key that is not here."
    await running.end()


async def test_the_payload_of_a_later_call_is_read_where_it_waits(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    first = await sealed.enqueue(KIND, {"n": 1}, unique_key="k", debounce=3600)
    again = await sealed.enqueue(KIND, {"n": 2}, unique_key="k", debounce=3600)
    waits = await sealed.enqueue(KIND, {"n": 3}, unique_key="w", unique="waiting")
    window = await sealed.enqueue(KIND, {"n": 4}, unique_key="x", unique_for=3600)
    live = await sealed.enqueue(KIND, {"n": 5}, unique_key="y")
    of_enum = await sealed.enqueue(KIND, {"n": 6}, unique_key=Keys.HOME, unique="waiting")
    assert (again.id, again.created) == (first.id, False)
    await rows.query("UPDATE jsworker.jobs SET run_at = now() WHERE id = %s", first.id)
    await start(scripted(echo), with_settings=encrypted)
    results = await asyncio.gather(*(each.result(60) for each in (first, waits, window, live, of_enum)))
    assert results == [{"n": number} for number in (2, 3, 4, 5, 6)]


async def test_schedules_are_encrypted_and_not_written_anew_for_nothing(
    sealed: JobClient, encrypted: Settings, make_settings: Make, rows: Rows, start: StartWorker
) -> None:
    seldom = scripted(echo, schedule=Every(days=366, payload={"secret": CANARY}))
    for _ in range(2):
        running = await start(seldom, with_settings=encrypted)
        await running.end()
    assert await rows.value("SELECT revision FROM jsworker.schedules") == 1
    rotated = make_settings(encryption_keys=text_of_keys(new=NEW, old=OLD), encrypted_only=True)
    running = await start(seldom, with_settings=rotated)
    assert await rows.value("SELECT revision FROM jsworker.schedules") == 2
    assert key_of_content(await rows.value("SELECT payload FROM jsworker.schedules")) == "aes-gcm new"
    async with JobClient(rotated) as client:
        await client.schedules.add("by hand", KIND, Every(days=366, payload={"n": 1}))
        by_hand = await client.schedules.run_now("by hand")
        assert await by_hand.result(60) == {"n": 1}
        assert (await client.get(by_hand.id)).payload == {"n": 1}
    await rows.query(
        "UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '1 s' WHERE name = %s", KIND
    )
    running.worker._components.schedules.wake()
    [fired] = await running.events.told("schedule.fired")
    await rows.becomes(UUID(fired["job_id"]), "completed")
    assert CANARY not in await whole_database(rows)


async def test_results_of_workflows_and_members_that_are_added(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    async def part(job: Job[Any]) -> Any:
        if job.payload["n"] == 1:
            await job.add_to_batch("part", [{"n": 100}])
        return job.payload["n"]

    async def merge(job: Job[Any]) -> Any:
        return {CANARY: sorted([each.result async for each in job.results_of("parts")])}

    await start(scripted(part, kind="part"), scripted(merge, kind="merge"), with_settings=encrypted)
    async with sealed.workflow("sums") as flow:
        flow.batch("part", [{"n": 1}, {"n": 2}], name="parts")
        flow.job("merge", {}, after="parts")
    assert await flow.result(60) == {CANARY: [1, 2, 100]}
    for row in await rows.query("SELECT payload, result FROM jsworker.jobs"):
        assert key_of_content(row["payload"]) == key_of_content(row["result"]) == "aes-gcm old"


async def test_a_changed_result_of_a_member_fails_the_job_that_reads_it(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    async def merge(job: Job[Any]) -> Any:
        return [each.result async for each in job.results_of("parts")]

    await start(scripted(echo, kind="part"), with_settings=encrypted)
    async with sealed.workflow("sums") as flow:
        flow.batch("part", [{"n": 1}], name="parts")
        flow.job("merge", {}, after="parts")
    [part] = await rows.query("SELECT id FROM jsworker.jobs WHERE kind = 'part'")
    await rows.becomes(part["id"], "completed")
    await change_result(rows, part["id"])
    await start(scripted(merge, kind="merge"), with_settings=encrypted)
    [merging] = await rows.query("SELECT id FROM jsworker.jobs WHERE kind = 'merge'")
    row = await rows.becomes(merging["id"], "failed")
    assert (row["failure_reason"], row["attempts"]) == ("payload", 1)


class Card(BaseModel):
    number: int
    owners: dict[str, int] = {}

    @field_validator("number")
    @classmethod
    def _check(cls, value: int) -> int:
        if value < 0:
            raise ValueError(f"{CANARY} is below zero")
        return value


class Charge(JobProcessor[Card]):
    kind = "charge"
    max_attempts = 1

    async def process(self, job: Job[Card]) -> None:
        raise AssertionError(job)


async def tells(job: Job[Any]) -> Any:
    secret = job.payload["secret"]
    match job.payload["how"]:
        case "raises":
            try:
                {}[secret]
            except KeyError:
                error = ValueError(secret)
                error.add_note(secret)
                raise error from ExceptionGroup(secret, [TypeError(secret)])
        case "fails":
            raise Fail(secret)
        case "retries":
            raise Retry(3600, secret)
        case "snoozes":
            raise Snooze(3600, secret)
        case "cancels":
            raise asyncio.CancelledError(secret)
        case "returns":
            return {secret: object()}
        case "in a step":
            return await job.step("first", lambda: {secret: object()})
        case _:
            raise InvalidPayload(secret)


async def hook_was_told(processor: Scripted) -> None:
    """Check that the hook got the error as it was."""
    assert CANARY in str(processor.failed)


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("raises", "failed", "ValueError: its words are left out"),
        ("fails", "failed", "Fail: its words are left out"),
        ("retries", "failed", "Retry: its words are left out"),
        ("snoozes", "scheduled", None),
        ("cancels", "failed", "cancelled, but not by jsworker"),
        ("returns", "failed", "InvalidResult: its words are left out"),
        ("in a step", "failed", "InvalidResult: its words are left out"),
        ("is invalid", "failed", "InvalidPayload: its words are left out"),
    ],
)
async def test_errors_quote_nothing(  # noqa: PLR0917 -- fixtures
    sealed: JobClient,
    encrypted: Settings,
    rows: Rows,
    start: StartWorker,
    how: str,
    status: str,
    says: str | None,
) -> None:
    processor = scripted(tells, backoff=LATER, max_attempts=1)
    running = await start(processor, with_settings=encrypted)
    job = await sealed.enqueue(KIND, {"how": how, "secret": CANARY})
    row = await rows.becomes(job.id, status)
    if says is not None:
        assert row["last_error"].startswith(says)
        await eventually(partial(hook_was_told, processor))
    if how == "raises":
        assert "test_encryption.py" in row["last_error"]
        assert "TypeError" in row["last_error"]
    assert CANARY not in await whole_database(rows)
    assert CANARY not in str(running.events.events)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"number": CANARY}, "payload of kind charge does not fit its type: int_parsing"),
        ({"number": -1}, "payload of kind charge does not fit its type: value_error"),
        (
            {"number": 1, "owners": {CANARY: CANARY}},
            "payload of kind charge does not fit its type: int_parsing",
        ),
    ],
)
async def test_a_payload_that_does_not_fit_is_not_quoted(  # noqa: PLR0917 -- fixtures
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker, payload: Any, says: str
) -> None:
    running = await start(Charge, with_settings=encrypted)
    job = await sealed.enqueue("charge", payload)
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["last_error"]) == ("payload", says)
    assert CANARY not in await whole_database(rows) + str(running.events.events)


async def test_sizes_are_those_of_what_is_stored(make_settings: Make, rows: Rows, start: StartWorker) -> None:
    async def long(job: Job[Any]) -> Any:
        if "checkpoint" in job.payload:
            await job.save_checkpoint("x" * 100)
        if "step" in job.payload:
            await job.step("first", lambda: "x" * 100)
        return "x" * 100

    small = make_settings(
        encryption_keys=text_of_keys(old=OLD),
        max_payload_bytes=150,
        max_result_bytes=150,
        max_checkpoint_bytes=150,
    )
    await start(scripted(long, max_attempts=1), with_settings=small)
    async with JobClient(small) as client:
        with pytest.raises(
            InvalidPayload, match=r"payload of \d{3} bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES=150"
        ):
            await client.enqueue(KIND, {"text": "x" * 100})
        for where, name in (("checkpoint", "CHECKPOINT"), ("step", "RESULT"), ("result", "RESULT")):
            job = await client.enqueue(KIND, {where: True})
            row = await rows.becomes(job.id, "failed")
            assert f"bytes exceeds JSWORKER_MAX_{name}_BYTES=150" in row["last_error"]


async def test_a_statement_for_ones_own_transaction_takes_the_clients_codec(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    statement = enqueue_statement(KIND, {"secret": CANARY}, codec=sealed.codec)
    engine = create_engine(sealed.database.url)
    with engine.begin() as connection:
        job_id = connection.execute(statement).one().id
    engine.dispose()
    assert CANARY not in await whole_database(rows)
    await start(scripted(echo), with_settings=encrypted)
    assert await sealed.result(job_id, 60) == {"secret": CANARY}


async def test_a_job_completes_in_its_own_transaction(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker
) -> None:
    async def commits(job: Job[Any]) -> None:
        async with job.transaction(result=job.payload) as session:
            await session.execute(text("SELECT 1"))

    await start(scripted(commits), with_settings=encrypted)
    job = await sealed.enqueue(KIND, {"secret": CANARY})
    assert await job.result(60) == {"secret": CANARY}
    assert key_of_content((await rows.job(job.id))["result"]) == "aes-gcm old"


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
async def test_children_are_encrypted(
    sealed: JobClient, encrypted: Settings, rows: Rows, start: StartWorker, *, alone: bool
) -> None:
    patient = encrypted.model_copy(update={"watchdog_timeout": 20.0})
    await start(Parent, scripted(echo), with_settings=patient)
    parent = await sealed.enqueue("parent", {"secret": CANARY}, max_stalls=1 if alone else 5)
    child = UUID(await parent.result(60))
    assert await sealed.result(child, 60) == {"secret": CANARY}
    assert key_of_content((await rows.job(child))["payload"]) == "aes-gcm old"


async def test_a_client_that_waits_encrypts(encrypted: Settings, rows: Rows, start: StartWorker) -> None:
    def use() -> None:
        with SyncJobClient(encrypted) as client:
            job = client.enqueue(KIND, {"secret": CANARY})
            assert job.result(60) == client.get(job.id).payload == {"secret": CANARY}
            assert client.codec is not None
        with SyncJobClient(encrypted.model_copy(update={"encryption_keys": None}), codec=Reverse()) as client:
            job = client.enqueue("elsewhere", {"secret": CANARY})
            assert client.get(job.id).payload == {"secret": CANARY}

    await start(scripted(echo), with_settings=encrypted)
    await asyncio.to_thread(use)
    assert CANARY not in await whole_database(rows)


async def test_a_job_in_a_process_of_its_own_has_the_keys(
    sealed: JobClient, encrypted: Settings, rows: Rows
) -> None:
    running = Running(Worker([Perilous, InSteps], encrypted.model_copy(update={"watchdog_timeout": 20.0})))
    running.worker.on("*", running.events)
    await running.worker.start()
    job = await sealed.enqueue("perilous", {"does": "report"})
    assert (await job.result(60))["pid"] != os.getpid()
    row = await rows.job(job.id)
    assert key_of_content(row["checkpoint"]) == key_of_content(row["result"]) == "aes-gcm old"
    assert (await sealed.get(job.id)).checkpoint == {"seen": None}
    steps = await sealed.enqueue("in-steps", {})
    await rows.becomes(steps.id, "scheduled")
    kept = await rows.query("SELECT result FROM jsworker.job_steps WHERE result IS NOT NULL")
    assert [key_of_content(step["result"]) for step in kept] == ["aes-gcm old"] * 2
    failing = await sealed.enqueue("perilous", {"does": "raise"}, max_attempts=1)
    row = await rows.becomes(failing.id, "failed")
    assert "raised in quarantine" not in row["last_error"].splitlines()[0]
    await running.end()


async def test_a_codec_that_is_given_cannot_be_made_in_another_process(
    settings: Settings, rows: Rows
) -> None:
    running = Running(Worker([Perilous], settings, codec=Reverse()))
    running.worker.on("*", running.events)
    await running.worker.start()
    async with JobClient(settings, codec=Reverse()) as client:
        job = await client.enqueue("perilous", {"does": "return"})
        assert (await job.result(60))["pid"] == os.getpid()
    assert json.dumps((await rows.job(job.id))["payload"]).startswith('{"$codec": ["reverse", "k", ')
    [degraded] = running.events.of("worker.degraded")
    assert degraded["reason"] == "the codec cannot be made in another process: name it in JSWORKER_CODEC"
    await running.end()


async def test_a_client_may_be_given_a_codec(settings: Settings, rows: Rows, start: StartWorker) -> None:
    await start(
        scripted(echo), with_settings=settings.model_copy(update={"codec": "tests.test_contents:Reverse"})
    )
    async with JobClient(settings, codec=Reverse()) as client:
        job = await client.enqueue(KIND, {"n": 1})
        assert await job.result(60) == {"n": 1}
