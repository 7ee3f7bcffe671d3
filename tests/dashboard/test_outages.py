"""The dashboard without PostgreSQL: it says so, and goes on once that is back."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from jsworker import Every, JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard, live
from tests.dashboard.conftest import PutJob
from tests.dashboard.test_live import stream_of
from tests.dashboard.viewer import Viewer
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.worker.rows import Rows

ADDRESSES = ("/", "/jobs", "/failures", "/keys", "/audit", "/jobs/cancel?all=yes", "/kinds/pause?kind=crop")


@pytest.fixture
async def cuttable(settings: Settings) -> AsyncIterator[tuple[Proxy, Any]]:
    """A dashboard, and what its connections to PostgreSQL go through."""
    async with proxied(settings.database_dsn()) as (proxy, url):
        changed = settings.model_copy(update={"database_url": url, "statement_timeout": 30.0})
        given = {name: getattr(changed, name) for name in changed.model_fields_set - {"nats_url"}}
        async with JobClient(Settings(**given)) as client:
            yield proxy, dashboard(client)


async def test_pages_and_questions_say_that_it_is_away(cuttable: tuple[Proxy, Any], put: PutJob) -> None:
    proxy, app = cuttable
    job_id = await put("queued")
    viewer = Viewer(app)
    question = await viewer.see(f"/jobs/{job_id}/cancel")
    proxy.cut()
    for address in ADDRESSES:
        assert "is not available" in (await viewer.see(address, 503)).text
    assert (await viewer.http.get("/jobs")).headers["refresh"] == "5"
    reported = await viewer.http.get("/jobs", headers={"cookie": "jsworker-said=1%20job%20cancelled"})
    assert ("1 job cancelled" in reported.text, reported.headers.get("refresh")) == (True, None)
    assert "is not available" in (await viewer.press(question, "Cancel", status=503)).text
    proxy.restore()
    for address in ADDRESSES:
        await viewer.see(address)
    assert "1 job cancelled" in (await viewer.press(question, "Cancel")).text


async def test_a_page_that_has_waited_for_others_loads_itself_again_after_a_while(
    cuttable: tuple[Proxy, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may answer nothing: pages that try it again must leave room for others, as the doctor."""
    _, app = cuttable
    monkeypatch.setattr("jsworker.dashboard.app._LONGEST_WAIT_SECONDS", 1.1)
    for _ in range(3):
        await app.state.reading.acquire()
    refused = await Viewer(app).http.get("/jobs")
    assert (refused.status_code, refused.headers["refresh"]) == (503, "30")


async def test_an_open_page_says_that_it_is_not_up_to_date_and_recovers(
    cuttable: tuple[Proxy, Any], put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, app = cuttable
    app.state.site.poller._interval = 0.05
    monkeypatch.setattr(live, "STREAM_SECONDS", 600.0)  # after a slow look the page rests for long
    await put("failed")
    sent: list[str] = []
    watching = asyncio.create_task(stream_of(app, 1_000_000, "/failures", sent))

    async def shows(words: str) -> None:
        assert words in "".join(sent)

    await eventually(partial(shows, "resize"))
    proxy.cut()
    await eventually(partial(shows, "event: stale\ndata: Not up to date: PostgreSQL at"))
    sent.clear()
    await put("failed", kind="crop")
    monkeypatch.setattr(live, "_SHARE", 1e-9)  # the time of reads that failed so counts for no rest
    await asyncio.sleep(0.5)
    proxy.restore()
    await eventually(partial(shows, "crop"))
    assert "event: stale\ndata: \n\n" in "".join(sent)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_an_action_whose_answer_is_lost_is_not_said_to_have_failed(
    cuttable: tuple[Proxy, Any], client: JobClient, rows: Rows
) -> None:
    proxy, app = cuttable
    await client.schedules.add("nightly", "resize", Every(days=1))
    viewer = Viewer(app)
    question = await viewer.see("/schedules/run-now?name=nightly")
    lost = proxy.lose_next_answer(b"COMMIT")
    page = await viewer.press(question, "Run now", status=503)
    assert lost.done()
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 1
    assert "It may have been done, or not" in page.text
    assert "Not now" not in page.text
    assert page.links["Audit"] == "/audit"


async def test_a_database_that_takes_no_writes_has_done_nothing(
    settings: Settings, put: PutJob, rows: Rows
) -> None:
    job_id = await put("queued")
    url = f"{settings.database_dsn()}?options=-c%20default_transaction_read_only%3Don"
    given = {name: getattr(settings, name) for name in settings.model_fields_set - {"nats_url"}}
    async with JobClient(Settings(**{**given, "database_url": url})) as client:
        viewer = Viewer(dashboard(client))
        page = await viewer.press(await viewer.see(f"/jobs/{job_id}/cancel"), "Cancel", status=503)
    assert "Not now" in page.text
    assert "is read-only" in page.text
    assert (await rows.job(job_id))["status"] == "queued"
