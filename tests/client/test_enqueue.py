"""Enqueueing: what is accepted is stored and published once; what is not leaves no trace."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from nats.js import JetStreamContext
from pydantic import BaseModel

from jsworker import JobClient, enqueue_statement
from jsworker.core.errors import InvalidJson, InvalidName, InvalidPayload, JsworkerError
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

UNREACHABLE = Settings(database_url="postgresql://nobody@127.0.0.1:1/nothing")
MARKER = "hunter2-do-not-show"
DURING = ("scheduled", "queued", "processing")


class Order(BaseModel):
    number: int
    tags: list[str] = []


class Text(str, Enum):  # noqa: UP042 -- a StrEnum is formatted by its value
    KIND = "of-an-enum"
    KEY = "home"
    TENANT = "acme"
    PRIORITY = "high"


class Attempts(int, Enum):
    FEW = 3


class OfEnum(JobProcessor):
    kind = Text.KIND

    async def process(self, job: Job[dict[str, Any]]) -> str:
        return f"{self.kind} {job.kind}"


class ShipOrder(JobProcessor[Order]):
    async def process(self, job: Job[Order]) -> dict[str, Any]:
        return {"type": type(job.payload).__name__, "number": job.payload.number}


async def count(rows: Rows) -> int:
    found: int = await rows.value("SELECT count(*) FROM jsworker.jobs")
    return found


async def published(rows: Rows, job_id: UUID) -> dict[str, Any]:
    """Wait until the publishing of a job is noted in its row."""

    async def marked() -> dict[str, Any]:
        row = await rows.job(job_id)
        assert not row["needs_publish"]
        return row

    return await eventually(marked)


async def test_the_first_job_waits_for_no_connection(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(_arguments: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("jsworker.ownership.pool.connect", connect)
    assert (await client.enqueue(KIND, {})).created


async def test_a_job_is_stored_published_and_marked(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings
) -> None:
    job = await client.enqueue("count-lines", {"repo": "é", "deep": [1, {"a": None}]})
    assert job.created
    row = await published(rows, job.id)
    assert (row["kind"], row["status"], row["dispatch"]) == ("count-lines", "queued", 1)
    assert row["payload"] == {"repo": "é", "deep": [1, {"a": None}]}
    assert (row["attempts"], row["fencing_token"], row["worker_id"]) == (0, 0, None)
    assert row["published_at"] >= row["created_at"]
    message = await js.get_msg(settings.stream, row["stream_seq"])
    assert message.subject == f"{settings.subject_prefix}.count-lines"
    assert message.headers is not None
    assert message.headers["Nats-Msg-Id"] == f"{job.id}:1"
    assert b"repo" not in (message.data or b"")  # the payload stays in the row


async def test_members_of_enums_name_kinds_and_keys_by_their_values(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings, start: StartWorker
) -> None:
    high: Any = Text.PRIORITY
    keyed = await client.enqueue(Text.KIND, {}, unique_key=Text.KEY, limit_key=Text.TENANT, priority=high)
    many = await client.enqueue_many(Text.KIND, [{}] * 40, max_attempts=Attempts.FEW)  # by COPY
    assert (await rows.job(many[0].id))["max_attempts"] == 3
    row = await published(rows, keyed.id)
    assert (row["kind"], row["unique_key"], row["limit_key"], row["priority"]) == (
        "of-an-enum",
        "home",
        "acme",
        0,
    )
    message = await js.get_msg(settings.stream, row["stream_seq"])
    assert message.subject == f"{settings.subject_prefix}.of-an-enum.high"
    await client.pause(Text.KIND, Text.TENANT)
    assert ("of-an-enum", "acme") in {(each["kind"], each["key"]) for each in await client.limits.list()}
    await client.resume(Text.KIND, Text.TENANT)
    await start(OfEnum())
    for job in (keyed, many[0]):
        assert (await rows.becomes(job.id, "completed"))["result"] == "of-an-enum of-an-enum"


@pytest.mark.parametrize(
    "payload",
    [Order(number=7), {"number": 7}, {"number": "7", "tags": []}],
    ids=["an instance", "a dict", "what it can be made from"],
)
async def test_a_payload_is_checked_by_the_processors_model(
    client: JobClient, rows: Rows, start: StartWorker, payload: Any
) -> None:
    await start(ShipOrder())
    job = await client.enqueue(ShipOrder, payload)
    row = await rows.becomes(job.id, "completed")
    assert (row["kind"], row["payload"]) == ("ship-order", {"number": 7, "tags": []})
    assert row["result"] == {"type": "Order", "number": 7}


async def test_a_payload_that_does_not_fit_is_refused_and_never_shown(client: JobClient, rows: Rows) -> None:
    for payload in ({"number": MARKER}, {}, [MARKER], MARKER, None, {"number": 1, "tags": [{"a": MARKER}]}):
        with pytest.raises(InvalidPayload, match=r"^payload of kind ship-order: ") as refusal:
            await client.enqueue(ShipOrder, payload)  # type: ignore[misc]
        assert MARKER not in str(refusal.value)
        assert "\n" not in str(refusal.value)
        with pytest.raises(InvalidPayload):
            await client.enqueue_many(ShipOrder, [{"number": 1}, payload])  # type: ignore[misc]
    assert await count(rows) == 0


class Loose(BaseModel):
    value: Any


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {MARKER: MARKER}
    circle["again"] = circle
    return circle


def _deep() -> list[Any]:
    deep: list[Any] = [MARKER]
    for _ in range(20_000):
        deep = [deep]
    return deep


UNSTORABLE: dict[str, Any] = {
    "NaN": {"a": math.nan},
    "an infinity": [math.inf],
    "a huge number": {"a": 10**400},
    "a huge float": 1.7e308,
    "NUL": {"a": f"{MARKER}\0"},
    "NUL in a key": {f"{MARKER}\0": 1},
    "a lone surrogate": {"a": f"{MARKER}\ud800"},
    "an object": {"a": object()},
    "a key that is no text": {1: MARKER},
    "a circle": _circle(),
    "too deep": _deep(),
    "a date": {"a": timedelta(1)},
    "bytes": MARKER.encode(),
    "too large": MARKER * 2**17,
    "too large in bytes": "é" * 2**19 + "é",
    "a model with NaN": Loose(value={"deep": [math.nan]}),
    "a model without a JSON form": Loose(value=object()),
    "a circle in a model": Loose(value=_circle()),
}


@pytest.mark.parametrize("case", UNSTORABLE)
async def test_what_cannot_be_stored_is_refused_before_anything_is_written(case: str) -> None:
    client = JobClient(UNREACHABLE)
    for call in (client.enqueue(KIND, UNSTORABLE[case]), client.enqueue_many(KIND, [{}, UNSTORABLE[case]])):
        with pytest.raises((InvalidJson, InvalidPayload), match=r"^(payloads\[1\]: )?payload ") as refusal:
            await call
        assert MARKER not in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "Count",
        "a b",
        "a\n",
        "a\0b",
        "-a",
        "a*",
        "a>",
        "é",
        "a/b",
        "x" * 65,
        "\ud800",
        7,
        None,
        "a;--",
    ],
)
async def test_kinds_with_forbidden_characters_are_refused_in_one_line(name: Any) -> None:
    client = JobClient(UNREACHABLE)
    for call in (lambda: client.enqueue(name, {}), lambda: client.enqueue_many(name, [{}])):
        with pytest.raises(InvalidName, match=r"must (match \^\[a-z0-9\]|be a kind's name)") as refusal:
            await call()
        assert "\n" not in str(refusal.value)
        str(refusal.value).encode()


@pytest.mark.parametrize("key", ["", "a\n", "a\0b", "\x1b[31m", "\u2028", "\ud800", "x" * 256, 7])
async def test_keys_with_forbidden_characters_are_refused_in_one_line(key: Any) -> None:
    client = JobClient(UNREACHABLE)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: client.enqueue(KIND, {}, unique_key=key),
        lambda: client.enqueue_many(KIND, [{}], unique_keys=[key]),
    ]
    for call in calls:
        with pytest.raises(InvalidName, match=r"must be text of 1 to 255 printable characters") as refusal:
            await call()
        assert "\n" not in str(refusal.value)
        str(refusal.value).encode()


async def test_a_kind_is_one_token_and_a_key_is_any_printable_text(client: JobClient, rows: Rows) -> None:
    with pytest.raises(InvalidName, match=r"kind 'a\.b' must match"):
        await client.enqueue("a.b", {})
    for key in ("a.b_c-9", "https://x.example/Ä?q=a b&c='", "漢\U0001f600" * 127):
        first = await client.enqueue("a_b-c9" + "x" * 58, {}, unique_key=key)
        assert (await rows.job(first.id))["unique_key"] == key
        [again] = await client.enqueue_many("a_b-c9" + "x" * 58, [{}], unique_keys=[key])
        assert (again.id, again.created) == (first.id, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay": -0.001},
        {"delay": math.nan},
        {"delay": math.inf},
        {"delay": 1e300},
        {"delay": Decimal("NaN")},
        {"delay": Decimal("sNaN")},
        {"max_attempts": 0},
        {"max_attempts": 2**31},
        {"max_stalls": 0},
        {"max_stalls": -1},
        {"max_stalls": 101},
    ],
    ids=str,
)
async def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    client = JobClient(UNREACHABLE)
    [name] = wrong
    for call in (client.enqueue(KIND, {}, **wrong), client.enqueue_many(KIND, [{}], **wrong)):
        with pytest.raises(ValueError, match=f"^{name}=.* must be from "):
            await call


@pytest.mark.parametrize("status", DURING)
async def test_a_key_names_one_live_job(
    client: JobClient, rows: Rows, start: StartWorker, status: str
) -> None:
    gate = Gate()
    if status == "processing":
        await start(scripted(gate.process))
    delay = 3600.0 if status == "scheduled" else 0.0
    first = await client.enqueue(KIND, {"n": 1}, unique_key="order-7", delay=delay)
    await rows.becomes(first.id, status)
    again = await client.enqueue(KIND, {"n": 2}, unique_key="order-7")
    [many] = await client.enqueue_many(KIND, [{"n": 3}], unique_keys=["order-7"])
    assert first.created
    assert (again.id, again.created) == (many.id, many.created) == (first.id, False)
    other = await client.enqueue("another-kind", {}, unique_key="order-7")
    assert other.created
    assert (await rows.job(first.id))["payload"] == {"n": 1}
    assert await count(rows) == 2


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
async def test_a_key_is_free_again_when_its_job_has_ended(client: JobClient, rows: Rows, status: str) -> None:
    first = await client.enqueue(KIND, {}, unique_key="order-7", delay=3600.0)
    await rows.query(
        "UPDATE jsworker.jobs SET status = %s, finished_at = clock_timestamp(), attempts = %s WHERE id = %s",
        status,
        int(status == "completed"),
        first.id,
    )
    again = await client.enqueue(KIND, {}, unique_key="order-7")
    assert again.created
    assert again.id != first.id


@pytest.mark.parametrize("many", [False, True])
async def test_a_job_with_a_delay_takes_the_key_of_one_that_has_expired(
    client: JobClient, rows: Rows, *, many: bool
) -> None:
    over = await client.enqueue(KIND, {}, unique_key="order-7", expires_in=3600.0)
    await rows.query("UPDATE jsworker.jobs SET expires_at = clock_timestamp()")
    if many:
        [again] = await client.enqueue_many(KIND, [{}], unique_keys=["order-7"], delay=60.0)
    else:
        again = await client.enqueue(KIND, {}, unique_key="order-7", delay=60.0)
    assert again.created
    assert (await rows.job(over.id))["failure_reason"] == "expired"
    assert not (await client.enqueue(KIND, {}, unique_key="order-7", delay=60.0)).created


async def test_of_many_twins_at_once_one_is_created(client: JobClient, rows: Rows) -> None:
    twins = await asyncio.gather(*(client.enqueue(KIND, {}, unique_key="order-7") for _ in range(20)))
    assert len({twin.id for twin in twins}) == 1
    assert [twin.created for twin in twins].count(True) == 1
    assert await count(rows) == 1


async def test_a_delayed_job_waits_and_then_runs(client: JobClient, rows: Rows, start: StartWorker) -> None:
    job = await client.enqueue(KIND, {}, delay=0.3)
    row = await rows.job(job.id)
    assert (row["status"], row["dispatch"], row["needs_publish"]) == ("scheduled", 0, False)
    await start(scripted(echo))
    row = await rows.becomes(job.id, "completed")
    assert row["queued_at"] - row["created_at"] >= timedelta(seconds=0.3)
    assert (row["dispatch"], row["attempts"]) == (1, 1)


async def test_ten_thousand_jobs_in_one_call_are_stored_in_order_and_published_once(
    rows: Rows, js: JetStreamContext, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine must not leave some to workers: there is none.
    monkeypatch.setattr("jsworker.client.client_publisher._RESERVED_SECONDS", 600.0)
    settings = make_settings(statement_timeout=5.0, heartbeat_interval=6.0)
    async with JobClient(settings) as client:
        enqueued = await client.enqueue_many(KIND, ({"n": n} for n in range(10_000)))

        async def published() -> None:
            assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0

        await eventually(published)
    assert len({one.id for one in enqueued}) == 10_000
    assert all(one.created for one in enqueued)
    stored = await rows.query(
        "SELECT id, CAST(payload ->> 'n' AS integer) AS n FROM jsworker.jobs ORDER BY n"
    )
    assert [row["id"] for row in stored] == [one.id for one in enqueued]
    assert (await js.stream_info(settings.stream)).state.messages == 10_000


async def test_closing_publishes_what_was_enqueued(
    rows: Rows, js: JetStreamContext, settings: Settings
) -> None:
    async with JobClient(settings) as client:
        await client.enqueue_many(KIND, [{"n": n} for n in range(300)])
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0
    assert (await js.stream_info(settings.stream)).state.messages == 300


async def test_many_jobs_with_keys_tell_in_order_which_existed(client: JobClient, rows: Rows) -> None:
    held = await client.enqueue(KIND, {"n": 0}, unique_key="b")
    keys = ["a", "b", None, "a", None]
    enqueued = await client.enqueue_many(KIND, [{"n": n} for n in range(1, 6)], unique_keys=keys)
    assert [one.created for one in enqueued] == [True, False, True, False, True]
    assert enqueued[1].id == held.id
    assert enqueued[3].id == enqueued[0].id
    assert (await rows.job(enqueued[0].id))["payload"] == {"n": 1}
    assert await count(rows) == 4
    assert await client.enqueue_many(KIND, []) == []
    with pytest.raises(ValueError, match="1 unique_keys for 2 payloads: one for each is needed"):
        await client.enqueue_many(KIND, [{}, {}], unique_keys=["a"])
    assert await count(rows) == 4


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_jobs_with_and_without_keys_are_one_statement(
    client: JobClient, rows: Rows, delay: float
) -> None:
    keys = [None, "a", "b", None, "c"]
    for created in ([True] * 5, [True, False, False, True, False]):
        enqueued = await client.enqueue_many(KIND, [{}] * 5, unique_keys=keys, delay=delay)
        assert [one.created for one in enqueued] == created
    assert await rows.value("SELECT count(DISTINCT CAST(xmin AS text)) FROM jsworker.jobs") == 2


async def test_limits_of_a_job_are_stored_with_it(client: JobClient, rows: Rows) -> None:
    job = await client.enqueue(KIND, {}, max_attempts=2, max_stalls=4)
    [many] = await client.enqueue_many(KIND, [{}], max_attempts=3, max_stalls=5, delay=60.0)
    left_open = await client.enqueue(KIND, {})
    found = [await rows.job(one.id) for one in (job, many, left_open)]
    assert [(row["max_attempts"], row["max_stalls"]) for row in found] == [(2, 4), (3, 5), (None, None)]


async def test_the_limit_of_payloads_is_a_setting() -> None:
    client = JobClient(UNREACHABLE.model_copy(update={"max_payload_bytes": 100}))
    with pytest.raises(JsworkerError, match="payload of 102 bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES=100"):
        await client.enqueue(KIND, "x" * 100)


def test_an_argument_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match=r"^delai=3: there is no such argument$"):
        enqueue_statement("count-words", {}, delai=3)  # type: ignore[call-overload]
