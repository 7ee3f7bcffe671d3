"""The dashboard without PostgreSQL: it says so, and goes on once that is back."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard, live
from tests.dashboard.conftest import PutJob
from tests.dashboard.test_live import stream_of
from tests.dashboard.viewer import Viewer
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied

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
    assert "is not available" in (await viewer.press(question, "Cancel", status=503)).text
    proxy.restore()
    for address in ADDRESSES:
        await viewer.see(address)
    assert "1 job cancelled" in (await viewer.press(question, "Cancel")).text


async def test_an_open_page_says_that_it_is_not_up_to_date_and_recovers(
    cuttable: tuple[Proxy, Any], put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, app = cuttable
    app.state.site.poller._interval = 0.05
    await put("failed")
    sent: list[str] = []
    watching = asyncio.create_task(stream_of(app, 1_000_000, "/failures", sent))

    async def shows(words: str) -> None:
        assert words in "".join(sent)

    await eventually(partial(shows, "resize"))
    proxy.cut()
    await eventually(partial(shows, "Not up to date: PostgreSQL at"))
    sent.clear()
    monkeypatch.setattr(live, "_RESTING", 1e9)  # the time of reads that failed so counts for no rest
    await asyncio.sleep(0.5)
    proxy.restore()
    await eventually(partial(shows, "resize"))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
