import asyncio
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy import text

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import Access, dashboard
from jsworker.dashboard.app import ACTIONS, PAGES
from jsworker.dashboard.pages import failures as failures_page
from jsworker.dashboard.pages.job import Content, content, contents
from jsworker.ownership.queries import failures, listing
from jsworker.ownership.queries.listing import MOST_KINDS
from jsworker.ownership.transitions.enqueue import new_job_id
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Shown, Viewer
from tests.worker.rows import Rows

STATES = ("scheduled", "queued", "processing", "completed", "failed", "cancelled")
JOB = re.compile(r"/jobs/([0-9a-f-]{36})$")


def jobs_of(page: Shown) -> list[str]:
    return [found[1] for link in page.links.values() if (found := JOB.search(link))]


async def test_overview_counts_jobs_and_leads_to_them(viewer: Viewer, put: PutJob) -> None:
    empty = await viewer.see("/")
    assert "No job has been enqueued yet" in empty.text
    for status in STATES:
        await put(status)
    page = await viewer.see("/")
    assert "1 waiting" in page.text
    assert "resize" in page.links
    assert "1 failed" in page.text
    assert len([tag for tag, _ in page.elements if tag == "figure"]) == 3


async def test_a_listing_has_each_state_and_its_filters_stand_in_the_address(
    viewer: Viewer, put: PutJob
) -> None:
    ids = {status: str(await put(status)) for status in STATES}
    assert set(jobs_of(await viewer.see("/jobs"))) == set(ids.values())
    for status, job_id in ids.items():
        assert jobs_of(await viewer.see("/jobs", status=status)) == [job_id]


@pytest.mark.parametrize(
    ("columns", "query"),
    [
        ({"kind": "crop"}, {"kind": "crop"}),
        ({"priority": 0}, {"priority": "high"}),
        ({"unique_key": "order 7"}, {"unique_key": "order 7"}),
        ({"limit_key": "tenant 7"}, {"key": "tenant 7"}),
        ({"worker_id": "w-é"}, {"worker": "w-é"}),
        ({"last_error": "KeyError: 'Seven'"}, {"error": "seven"}),
        ({"created_at": sql.SQL("TIMESTAMPTZ '2020-01-01Z'")}, {"until": "2021-01-01T00:00"}),
    ],
    ids=lambda value: next(iter(value)),
)
async def test_each_filter_finds_its_job(
    viewer: Viewer, put: PutJob, columns: dict[str, Any], query: dict[str, str]
) -> None:
    await put("processing")
    wanted = await put("processing", **columns)
    given = {**query, "status": "processing"}
    page = await viewer.see("/jobs", **given)
    assert jobs_of(page) == [str(wanted)]
    [form] = [each for each in page.forms if each.action == "/jobs"]
    assert given.items() <= dict(form.values).items()


async def test_of_a_filter_that_is_given_twice_every_part_of_the_page_takes_the_first(
    viewer: Viewer, put: PutJob
) -> None:
    failed = await put("failed")
    await put("queued")
    page = await viewer.see("/jobs?status=failed&status=queued")
    assert jobs_of(page) == [str(failed)]
    [stream] = [found["sse-connect"] for _, found in page.elements if "sse-connect" in found]
    assert httpx.URL(stream).params.get_list("status") == ["failed"]
    [form] = [each for each in page.forms if each.action != "/jobs"]
    assert dict(form.values)["status"] == "failed"


@pytest.mark.parametrize(
    "query",
    [
        *({"kind": "No Kind"}, {"status": "x"}, {"priority": "urgent"}, {"since": "today"}),
        *({"after": "7"}, {"limit": "0"}, {"failure": "7"}, {"unique_key": "\0"}),
        {"limit": "0000000010000000"},
    ],
    ids=lambda value: next(iter(value)),
)
async def test_a_filter_that_makes_no_sense_is_named_in_one_line(
    viewer: Viewer, query: dict[str, str]
) -> None:
    page = await viewer.see("/jobs", 400, **query)
    assert next(iter(query)) in page.text


async def test_pages_of_a_listing_have_each_job_once(viewer: Viewer, put: PutJob) -> None:
    ids = [str(await put("failed")) for _ in range(25)]
    for query in ({}, {"status": "failed"}, {"status": "failed", "kind": "resize"}):
        found: list[str] = []
        page = await viewer.see("/jobs", limit=10, **query)
        found += jobs_of(page)
        while "Next page" in page.links:
            page = await viewer.see(page.links["Next page"])
            found += jobs_of(page)
        assert found == ids[::-1]


async def test_queued_jobs_of_more_kinds_than_are_listed(viewer: Viewer, put: PutJob) -> None:
    for number in range(MOST_KINDS):
        await put("queued", kind=f"kind-{number:03d}")
    left_out = "Only jobs of the first 100 kinds are listed here"
    assert left_out not in (await viewer.see("/jobs", status="queued")).text
    await put("queued", kind="last")
    assert left_out in (await viewer.see("/jobs", status="queued")).text
    assert left_out not in (await viewer.see("/jobs", status="queued", kind="last")).text


async def test_a_job_is_shown_with_its_story_and_what_it_holds(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    job_id = await put(
        "failed",
        payload=Jsonb({"size": 7}),
        checkpoint=Jsonb([1]),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    await rows.query(
        "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token) VALUES (%s, 'load', '5', 1)",
        job_id,
    )
    page = await viewer.see(f"/jobs/{job_id}")
    for words in (
        '"size": 7',
        "ValueError: a failure",
        "0af7651916cd43dd8448eb211c80319c",
        "load",
        "Timeline",
    ):
        assert words in page.text
    assert "Retry …" in page.links
    assert "Cancel …" not in page.links


async def test_a_queued_job_names_what_keeps_workers_from_it(
    viewer: Viewer, client: JobClient, put: PutJob, rows: Rows
) -> None:
    async def listed() -> str:
        return (await viewer.see("/jobs?status=queued")).text

    job_id = await put("queued")
    page = await viewer.see(f"/jobs/{job_id}")
    assert re.search(r"Waits for [\d.]+ m?s ; no live worker serves its kind", page.text)
    assert re.search(r"waiting for [\d.]+ m?s ; no live worker serves its kind", await listed())
    await rows.query(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state) VALUES ('worker-1', 'h', 1, '{resize}', 1, '1', '5 s', 'drained')"
    )
    drained = "every live worker for its kind is drained or ending"
    for address in (f"/jobs/{job_id}", "/jobs?status=queued"):
        assert (await viewer.see(address)).links[drained] == "/workers"
    await rows.query("UPDATE jsworker.workers SET state = 'running'")
    page = await viewer.see(f"/jobs/{job_id}")
    assert re.search(r"Waits for a worker for [\d.]+ m?s ", page.text)
    assert "its kind" not in await listed()
    await client.pause("resize")
    page = await viewer.see(f"/jobs/{job_id}")
    assert re.search(r"Waits for [\d.]+ m?s ; its kind is paused for [\d.]+ m?s", page.text)
    assert re.search(r"waiting for [\d.]+ m?s ; its kind is paused", await listed())
    await viewer.press(await viewer.see(page.links["Resume …"]), "Resume")
    assert "Waits for a worker" in (await viewer.see(f"/jobs/{job_id}")).text


async def test_due_and_held_jobs_name_what_keeps_workers_from_them(
    viewer: Viewer, client: JobClient, put: PutJob
) -> None:
    long_ago = sql.SQL("clock_timestamp() - interval '90 s'")
    due = await put("scheduled", run_at=long_ago, created_at=sql.SQL("clock_timestamp() - interval '3 min'"))
    held = await put("scheduled", run_at=None, held_by="limit", held_at=long_ago)
    later = await put("scheduled")
    unserved = "; no live worker serves its kind"
    page = await viewer.see(f"/jobs/{due}")
    assert f"Due 1 m ago {unserved}" in page.text
    assert "was due, but not queued" in page.source
    page = await viewer.see(f"/jobs/{held}")
    assert re.search(f"Waits for a slot of its limit , for 1 m [0-9]+ s {unserved}", page.text)
    assert page.links["a slot of its limit"] == "/keys?kind=resize"
    assert unserved not in (await viewer.see(f"/jobs/{later}")).text
    page = await viewer.see("/jobs?status=scheduled")
    assert f"due 1 m ago {unserved}" in page.text
    assert f"waits for a slot of its limit{unserved}" in page.text
    assert page.text.count(unserved) == 2
    await client.pause("resize")
    for job_id in (due, held):
        page = await viewer.see(f"/jobs/{job_id}")
        assert "; its kind is paused for" in page.text
        assert page.links["Resume …"] == "/kinds/resume?kind=resize"
    assert (await viewer.see("/jobs?status=scheduled")).text.count("; its kind is paused") == 2


async def test_a_run_without_a_heartbeat_stands_out(viewer: Viewer, put: PutJob) -> None:
    alive = await put("processing", last_activity_at=sql.SQL("clock_timestamp() + interval '1 min'"))
    for address in (f"/jobs/{alive}", "/jobs"):
        assert "bad-text" not in (await viewer.see(address)).source
    silent = await put("processing", last_activity_at=sql.SQL("clock_timestamp() - interval '90 s'"))
    page = await viewer.see(f"/jobs/{silent}")
    assert re.search(r'<dd class="bad-text"><time [^>]+>1 m ago', page.source)
    assert len(re.findall(r"no heartbeat for 1 m \d+ s", (await viewer.see("/jobs")).text)) == 1


async def test_a_run_whose_worker_is_to_send_few_heartbeats_does_not_stand_out(
    settings: Settings, put: PutJob
) -> None:
    rare = {"heartbeat_interval": 30.0, "crash_threshold": 90.0, "stale_threshold": 90.0}
    given = {name: getattr(settings, name) for name in settings.model_fields_set - {"nats_url"}}
    job_id = await put("processing", last_activity_at=sql.SQL("clock_timestamp() - interval '29 s'"))
    async with JobClient(Settings(**given | rare)) as client:
        viewer = Viewer(dashboard(client))
        for address in ("/jobs", f"/jobs/{job_id}"):
            page = await viewer.see(address)
            assert "no heartbeat for" not in page.text
            assert "bad-text" not in page.source
        await viewer.http.aclose()


async def test_a_job_shows_those_that_it_enqueued(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    parent, child, gone = await put("completed"), await put("failed"), new_job_id()
    detail = {"jobs": 3, "kinds": "resize", "ids": [str(child), str(gone), "<b>"]}
    await rows.query(
        "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)"
        " VALUES (%s, 'child_jobs', 'worker-1', 1, %s)",
        parent,
        Jsonb(detail),
    )
    page = await viewer.see(f"/jobs/{parent}")
    assert f"/jobs/{child}" in page.addresses
    assert f"/jobs/{gone}" not in page.addresses
    assert "jobs enqueued with its completion: 3 (resize)" in page.text
    assert "Jobs that it enqueued" not in (await viewer.see(f"/jobs/{child}")).text


async def test_failures_are_grouped_and_lead_to_their_jobs(viewer: Viewer, put: PutJob) -> None:
    same = {str(await put("failed", last_error=f"KeyError: {number}")) for number in range(3)}
    await put("failed", last_error="OSError: disk full")
    page = await viewer.see("/failures")
    [link] = [href for words, href in page.links.items() if words.startswith("KeyError")]
    assert set(jobs_of(await viewer.see(link))) == same


async def test_failures_are_listed_page_by_page(
    viewer: Viewer, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures_page, "_LIMIT", 1)
    for error in ("KeyError: 1", "OSError: disk full"):
        await put("failed", last_error=error)
    first = await viewer.see("/failures")
    assert "First page" not in first.links
    second = await viewer.see(first.links["Next page"])
    assert ("KeyError" in first.text) != ("KeyError" in second.text)
    assert second.links["First page"] == "/failures"


async def test_a_sample_of_failures_is_not_shown_as_their_total(
    viewer: Viewer, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours in (0, 0, 0, 2):
        ended = datetime.now(UTC) - timedelta(hours=hours)
        await put("failed", last_error="KeyError: 1", finished_at=ended)
    assert "4 in 24 hours, 3 in the last</title>" in (await viewer.see("/failures")).source
    monkeypatch.setattr(failures, "_LEAST_BOUND", 1)
    for bound, says in (
        (5, "4 in 24 hours, 3 in the last"),
        (4, "4+ in 24 hours, 3 in the last, of the last 4"),
        (2, "2+ in 24 hours, 2+ in the last, of the last 2"),
    ):
        monkeypatch.setattr(failures, "BOUND", bound)
        assert f"<title>{says}</title>" in (await viewer.see("/failures")).source


async def test_who_may_only_read_sees_neither_contents_nor_texts_of_errors(
    client: JobClient, put: PutJob, rows: Rows
) -> None:
    held = {name: Jsonb({"secret": f"veiled {name}"}) for name in ("payload", "result", "checkpoint")}
    job_id = await put("failed", last_error="KeyError: 'veiled key'\nveiled trace", **held)
    await rows.query(
        "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token) "
        "VALUES (%s, 's', '\"veiled\"', 1)",
        job_id,
    )
    await rows.query(
        "INSERT INTO jsworker.job_events (job_id, event, error) VALUES (%s, 'error', 'KeyError: veiled')",
        job_id,
    )
    viewer = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    for address in ("/", "/jobs", f"/jobs/{job_id}", "/failures"):
        page = await viewer.see(address)
        assert "veiled" not in page.source
        assert not page.has("Retry")
        assert "Retry …" not in page.links
    await viewer.see("/jobs", 400, error="veiled")
    may_see = Viewer(dashboard(client, authorize=lambda _: Access(payloads=True)))
    assert "veiled trace" in (await may_see.see(f"/jobs/{job_id}")).text


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("hunter2", "an error"),  # what `raise Fail("hunter2")` leaves
        ("hunter2: no such user", "an error"),
        ("hunter2\nKeyError: 1", "an error"),
        ("CardDeclined: hunter2\nTraceback (most recent call last):\n  File", "CardDeclined"),
        ("billing.CardError: hunter2", "billing.CardError"),
        ("timed out after 5 s; KeyError: hunter2", "an error"),
    ],
)
async def test_of_an_error_a_reader_sees_the_type_alone(
    client: JobClient, put: PutJob, error: str, shown: str
) -> None:
    job_id = await put("failed", last_error=error)
    viewer = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    for address in ("/jobs", f"/jobs/{job_id}"):
        page = await viewer.see(address)
        assert "hunter2" not in page.source
        assert shown in page.text
    assert "hunter2" not in (await viewer.see("/failures")).source


async def test_errors_of_earlier_runs_are_shown_with_their_tracebacks(
    client: JobClient, viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line {}, in process'
    first, last = (f"KeyError: {n}\n{trace.format(n)}" for n in (1, 2))
    job_id = await put("failed", last_error=last, fencing_token=2, attempts=2, errors=2)
    for token, event, error in ((1, "error", first), (2, "failed", last)):
        await rows.query(
            "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error)"
            " VALUES (%s, %s, 'worker-1', %s, %s)",
            *(job_id, event, token, error),
        )
    page = await viewer.see(f"/jobs/{job_id}")
    assert page.text.count('a.py", line 1') == 1
    assert page.text.count('a.py", line 2') == 1
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    assert "a.py" not in (await reader.see(f"/jobs/{job_id}")).source


async def test_an_error_after_the_completion_is_shown_beside_the_last_error(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    first, late = "KeyError: 1\nTraceback", "ValueError: 2\nTraceback"
    job_id = await put("completed", last_error=first, fencing_token=2, attempts=2, errors=1)
    for token, event, error in ((1, "error", first), (2, "error_after_completion", late)):
        await rows.query(
            "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error)"
            " VALUES (%s, %s, 'worker-1', %s, %s)",
            *(job_id, event, token, error),
        )
    errors = (await viewer.see(f"/jobs/{job_id}")).text.partition("Last error")[2]
    assert (errors.count("KeyError: 1"), errors.count("Other errors")) == (1, 1)
    assert "ValueError: 2" in errors.partition("Other errors")[2]


async def test_times_are_in_utc_wherever_the_dashboard_runs(
    viewer: Viewer, put: PutJob, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await put("scheduled", fencing_token=1, attempts=1, errors=1)
    entry = (
        "INSERT INTO jsworker.job_events (job_id, event, fencing_token, error, detail)"
        " VALUES (%s, %s, 1, %s, %s)"
    )
    until = {"run_at": "2026-03-01T12:00:00+00:00", "until": "2026-03-01T12:00:00+00:00", "step": "rest"}
    for event, error in (("error", "ValueError: x"), ("sleep", None)):
        await rows.query(entry, job_id, event, error, Jsonb(until))
    try:
        monkeypatch.setenv("TZ", "JST-9")
        time.tzset()
        page = await viewer.see(f"/jobs/{job_id}")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "to run again from 2026-03-01 12:00:00" in page.text
    assert "sleep rest began, until 2026-03-01 12:00:00" in page.text
    assert "2026-03-01 21:00:00" not in page.source


async def test_who_may_do_nothing_with_jobs_has_nothing_to_tick(
    client: JobClient, viewer: Viewer, put: PutJob
) -> None:
    await put("completed")
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    for each, status, ticks in ((viewer, "", 2), (viewer, "completed", 0), (reader, "", 0)):
        page = await each.see("/jobs", status=status)
        assert len(jobs_of(page)) == 1
        main = [found for tag, found in page.elements if tag == "input" and found.get("type") == "checkbox"]
        assert len([found for found in main if found.get("name") != "all"]) == ticks


async def test_an_overview_of_some_kinds_says_that_there_are_more(
    viewer: Viewer, put: PutJob, rows: Rows
) -> None:
    words = "these figures are of the kinds of this page"
    await put("queued")
    assert words not in (await viewer.see("/")).text
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, queued_at) SELECT gen_random_uuid(),"
        " 'kind-' || n, '{}', 'queued', now() FROM generate_series(1, 100) AS n"
    )
    page = await viewer.see("/")
    assert words in page.text
    page = await viewer.see(page.links["More kinds"])
    assert words in page.text
    assert page.links["First page"] == "/"


async def test_what_no_row_can_hold_is_refused(viewer: Viewer, rows: Rows) -> None:
    for path in (*(page.path for page in PAGES), *(action.path for action in ACTIONS)):
        page = await viewer.see(path.replace("{id:uuid}", NO_JOB), 400, after="\0")
        assert "'after' must not hold NUL characters" in page.text, path
    question = await viewer.see("/kinds/pause?kind=crop")
    page = await viewer.press(question, "Pause", {"reason": "a\0b"}, status=400)
    assert "'reason' must not hold NUL characters" in page.text
    assert await rows.value("SELECT count(*) FROM jsworker.limits") == 0


@pytest.mark.parametrize(
    "address",
    [
        *(f"/{name}?after=zzzz" for name in ("", "kinds", "workers")),
        *(f"/{name}?after={UUID(int=0)}" for name in ("workflows", "audit")),
        f"/failures?after_kind=zzzz&after={UUID(int=0)}",
        "/keys?after=zzzz:",
        "/dead-messages?after=1",
    ],
)
async def test_a_page_behind_the_last_one_leads_to_the_first(viewer: Viewer, address: str) -> None:
    page = await viewer.see(address)
    assert "Nothing follows here. First page" in page.text
    assert page.links["First page"] == address.partition("?")[0]
    assert "Nothing follows here" not in (await viewer.see(page.links["First page"])).text


async def test_what_was_done_is_said_once(viewer: Viewer) -> None:
    for address, status in (("/audit", 200), ("/nothing", 404), ("/kinds/pause?kind=crop", 200)):
        viewer.http.cookies.set("jsworker-said", "one job cancelled", domain="localhost.local")
        assert "one job cancelled" in (await viewer.see(address, status)).text
        assert "one job cancelled" not in (await viewer.see(address, status)).text


def test_no_more_of_a_content_is_written_than_shown() -> None:
    read: list[int] = []

    class Numbers(list[int]):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                read.append(number)
                yield number

    found = content("payload", {"numbers": Numbers(range(100_000))}, payloads=True)
    assert (len(found.text), found.hidden) == (65_536, "cut after 65,536 characters")
    assert len(read) < 10_000
    assert content("payload", [1], payloads=True) == Content("payload", "[\n  1\n]")


@pytest.mark.parametrize("nested", [90, 900, 950, 970, 5_000])
async def test_contents_may_be_nested_as_deep_as_postgresql_allows(
    viewer: Viewer, put: PutJob, rows: Rows, nested: int
) -> None:
    value = f"{'[' * nested}{']' * nested}"
    job_id = await put("queued", payload=sql.SQL(f"jsonb '{value}'"))
    statement = "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token) VALUES (%s, 's', %s, 1)"
    await rows.query(statement, job_id, value)
    event = "INSERT INTO jsworker.job_events (job_id, event, detail) VALUES (%s, %s, CAST(%s AS jsonb))"
    for name in ("claimed", "cleared", "child_jobs", "unheard-of"):
        await rows.query(
            event, job_id, name, f'{{"jobs": {value}, "kinds": {value}, "reason": {value}, "ids": [{value}]}}'
        )
    page = await viewer.see(f"/jobs/{job_id}")
    assert "[" in page.text


@pytest.mark.parametrize(
    "value",
    [
        sql.SQL("to_jsonb(repeat('x', 2000000))"),  # stored in some kilobytes
        sql.SQL(
            "(SELECT to_jsonb(string_agg(md5(CAST(n AS text)), '')) FROM generate_series(1, 62500) AS n)"
        ),
    ],
    ids=["compressed", "as it is"],
)
async def test_a_content_that_is_too_large_is_not_read(
    viewer: Viewer, client: JobClient, put: PutJob, value: sql.SQL
) -> None:
    job_id = await put("queued", payload=value, checkpoint=Jsonb([8]))
    page = await viewer.see(f"/jobs/{job_id}")
    assert re.search(
        rf"of [12],\d\d\d,\d\d\d bytes, too large to be shown here; `jsworker job {job_id} --json` shows it",
        page.text,
    )
    assert "[ 8 ]" in page.text
    assert len(page.source) < 100_000
    row = await listing.get_job_shown(client.database, job_id, contents=True)
    assert (row["payload"], row["checkpoint"], row["result_bytes"]) == (None, [8], None)
    row = await listing.get_job_shown(client.database, job_id, contents=False)
    assert (row["payload"], row["checkpoint"]) == (None, None)
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    assert "Checkpoint you may not see what jobs hold" in (await reader.see(f"/jobs/{job_id}")).text
    await reader.http.aclose()


async def test_a_content_that_is_null_is_none(client: JobClient, put: PutJob) -> None:
    job_id = await put("completed", payload=Jsonb(None), result=Jsonb(None), checkpoint=Jsonb(True))
    for payloads in (True, False):
        row = await listing.get_job_shown(client.database, job_id, contents=payloads)
        assert (row["payload_bytes"], row["result_bytes"]) == (None, None)
        shown = [each.name for each in contents(row, payloads=payloads)]
        assert shown == ["checkpoint"]


async def test_an_encrypted_content_is_shown_to_nobody(viewer: Viewer, put: PutJob) -> None:
    job_id = await put("queued", payload=Jsonb({"$codec": ["aes-gcm", "k1", "c2VjcmV0"]}))
    page = await viewer.see(f"/jobs/{job_id}")
    assert "encrypted" in page.text
    assert "c2VjcmV0" not in page.source


NO_JOB = f"{'0' * 8}-0000-7000-8000-{'0' * 12}"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (f"/jobs/{NO_JOB}", f"no job has id {NO_JOB}"),
        ("/nothing", "there is no page '/nothing'"),
        ("/jobs/7", "there is no page '/jobs/7'"),
    ],
)
async def test_what_there_is_not_is_not_found(viewer: Viewer, address: str, says: str) -> None:
    assert says in (await viewer.see(address, 404)).text


@pytest.mark.parametrize("address", ["/", "/jobs", "/failures"])
async def test_a_page_that_takes_too_long_says_so(
    client: JobClient, settings: Settings, address: str
) -> None:
    viewer = Viewer(dashboard(client, read_seconds=0.2))
    with psycopg.connect(settings.database_dsn()) as other:
        other.execute("LOCK TABLE jsworker.jobs IN ACCESS EXCLUSIVE MODE")
        page = await viewer.see(address, 503)
    assert "longer than 0.2 s" in page.text


async def test_a_page_does_not_wait_for_ever_for_others_that_read(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = dashboard(client)
    viewer = Viewer(app)
    monkeypatch.setattr("jsworker.dashboard.app._LONGEST_WAIT_SECONDS", 0.2)
    places = app.state.reading
    while not places.locked():
        await places.acquire()
    for path in ("/jobs", "/jobs/cancel?all=yes"):
        async with asyncio.timeout(30):
            page = await viewer.see(path, 503)
        assert "other pages are still being read: try again in a moment" in page.text
    places.release()
    await viewer.see("/jobs")
    assert not places.locked()
    await viewer.http.aclose()


async def test_reads_cannot_write(client: JobClient, rows: Rows, put: PutJob) -> None:
    job_id = await put("queued")
    reads = client.database.for_reading(seconds=5.0)
    with pytest.raises(Exception, match="25006"):
        await reads.run(text("DELETE FROM jsworker.jobs WHERE id = :id"), {"id": job_id})
    assert (await rows.job(job_id))["status"] == "queued"
    [row] = await client.database.run(text("SELECT current_setting('transaction_read_only') AS setting"))
    assert row.setting == "off"


async def test_it_works_under_any_prefix(client: JobClient, put: PutJob) -> None:
    job_id = await put("failed")
    app = FastAPI()
    app.mount("/ops/jobs", dashboard(client))
    viewer = Viewer(app)
    seen: set[str] = set()
    todo = ["/ops/jobs/"]
    while todo:
        address = todo.pop()
        if address.partition("?")[0] in seen:
            continue
        seen.add(address.partition("?")[0])
        page = await viewer.see(address)
        for _, found in page.elements:
            links = [found.get(name) for name in ("href", "src", "action", "formaction", "sse-connect")]
            assert all(link.startswith(("/ops/jobs/", "#")) for link in links if link), (address, links)
            if "/static/" not in (link := found.get("href", "#")) and not link.startswith("#"):
                todo.append(link)
    assert f"/ops/jobs/jobs/{job_id}/retry" in seen
    assert len(seen) >= len(PAGES)
    assert (await viewer.http.get("/ops/jobs/static/dashboard.css")).status_code == 200
    lost = await viewer.see("/ops/jobs/static/gone.css", 404)
    assert lost.links["Jobs"] == "/ops/jobs/jobs"
    assert isinstance((await viewer.http.get("/ops/jobs", follow_redirects=False)), httpx.Response)
