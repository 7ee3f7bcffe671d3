"""Kinds and keys: what limits them, and pausing them."""

import pytest

from jsworker.client import JobClient
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.processor import JobProcessor
from jsworker.dashboard import Access
from tests.dashboard.browsing import EVIL, browsing
from tests.worker.running import StartWorker

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


class Slow(JobProcessor):
    kind = "slow"
    limit = Limit(2)

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError


async def test_kinds_show_what_live_workers_serve(client: JobClient, start: StartWorker) -> None:
    await client.pause("slow", reason=EVIL)
    await start(Slow)
    await client.enqueue("slow", {})
    await client.enqueue("unserved", {})
    async with browsing(client) as browser:
        page = await browser.page("/kinds")
    assert "slow paused for" in page.text
    assert "0 of 2 at once" in page.text
    assert "1 worker" in page.text
    assert "none is alive" in page.text
    assert "/kinds/resume?kind=slow" in page.links()
    assert "/kinds/pause?kind=unserved" in page.links()


async def test_a_kind_and_a_key_are_paused_and_resumed(client: JobClient) -> None:
    async with browsing(client) as browser:
        page = await browser.act("/kinds/pause?kind=mail", seconds="3600", reason="the server is moved")
        assert "kind mail is paused" in page.text
        await browser.act("/kinds/pause?kind=mail&key=tenant-9", reason=EVIL)
        found = {each["key"]: each for each in await client.limits.list()}
        assert (found[""]["reason"], found["tenant-9"]["reason"]) == ("the server is moved", EVIL)
        assert found[""]["paused_until"] is not None
        page = await browser.page("/keys?kind=mail")
        assert "/kinds/resume?kind=mail&key=tenant-9" in page.links()
        page = await browser.act("/kinds/resume?kind=mail&key=tenant-9")
        assert "kind mail, key tenant-9 goes on" in page.text
        again = await browser.act("/kinds/resume?kind=mail&key=tenant-9")
        assert again.status == 409
    [last, *_] = await client.audit()
    assert (last.action, last.target["kind"], last.changed) == ("resume", "mail", 1)


async def test_limits_are_set_and_reset(client: JobClient) -> None:
    async with browsing(client) as browser:
        page = await browser.act("/kinds/set-limits?kind=mail", running="4", rate="100", per="60")
        assert "kind mail: 4 at once, 100 in 60 s" in page.text
        numbers = await client.limits.numbers("mail")
        assert (numbers.max_running, numbers.rate, numbers.per) == (4, 100, 60.0)
        assert "4" in [
            found.get("value") for tag, found in (await browser.page("/kinds/set-limits?kind=mail")).tags
        ]
        await browser.act("/kinds/reset-limits?kind=mail")
        assert (await client.limits.numbers("mail")).max_running is None
        assert (await browser.act("/kinds/set-limits?kind=mail", running="", rate="", per="")).status == 400
        assert (await browser.act("/kinds/set-limits?kind=mail", running="many")).status == 400
        assert (await browser.page("/kinds/pause?kind=No%20Kind", 400)).status == 400


async def test_keys_are_listed_page_by_page(client: JobClient) -> None:
    for number in range(101):
        await client.limits.set("mail", Limit(1), Rate(5), key=f"tenant-{number:03}")
    async with browsing(client) as browser:
        first = await browser.page("/keys")
        [behind] = [link for link in first.links() if "after=" in link]
        second = await browser.page(behind)
        assert "tenant-100" not in first.text
        assert "tenant-100" in second.text
        await browser.page("/keys?after=none", 400)


async def test_without_the_right_nothing_is_offered_or_done(client: JobClient) -> None:
    await client.enqueue("mail", {})
    async with browsing(client, authorize=lambda _: Access.READ) as browser:
        page = await browser.page("/kinds")
        assert not [link for link in page.links() if "/pause" in link or "/enqueue" in link]
        assert (await browser.http.get("/kinds/pause?kind=mail")).status_code == 403
