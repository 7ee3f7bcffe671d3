"""Kinds and keys: what limits them, and pausing them."""

import httpx
import pytest

from jsworker.client import JobClient
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.processor import JobProcessor
from jsworker.dashboard import Access, dashboard
from tests.dashboard.viewer import Viewer
from tests.worker.running import StartWorker

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]

EVIL = "'\"><script>alert(1)</script>"


class Slow(JobProcessor):
    kind = "slow"
    limit = Limit(2)

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError(job)


async def test_kinds_show_what_live_workers_serve(
    viewer: Viewer, client: JobClient, start: StartWorker
) -> None:
    await client.pause("slow", reason=EVIL)
    await start(Slow)
    await client.enqueue("slow", {})
    await client.enqueue("unserved", {})
    page = await viewer.see("/kinds")
    assert "paused for" in page.text
    assert EVIL in page.text
    assert "0 of 2 at once" in page.text
    assert "1 worker" in page.text
    assert "none is alive" in page.text
    links = [found["href"] for tag, found in page.elements if tag == "a"]
    assert "/kinds/resume?kind=slow" in links
    assert "/kinds/pause?kind=unserved" in links


async def test_a_kind_and_a_key_are_paused_and_resumed(viewer: Viewer, client: JobClient) -> None:
    question = await viewer.see("/kinds/pause?kind=mail")
    page = await viewer.press(question, "Pause", {"seconds": "3600", "reason": "the server is moved"})
    assert "kind mail is paused" in page.text
    await viewer.press(await viewer.see("/kinds/pause?kind=mail&key=tenant-9"), "Pause", {"reason": EVIL})
    found = {each["key"]: each for each in await client.limits.list()}
    assert (found[""]["reason"], found["tenant-9"]["reason"]) == ("the server is moved", EVIL)
    assert found[""]["paused_until"] is not None
    page = await viewer.see("/keys?kind=mail")
    assert "/kinds/resume?kind=mail&key=tenant-9" in page.addresses
    question = await viewer.see("/kinds/resume?kind=mail&key=tenant-9")
    assert "kind mail, key tenant-9 goes on" in (await viewer.press(question, "Resume")).text
    await viewer.press(question, "Resume", status=409)
    [last, *_] = await client.audit()
    assert (last.action, last.target["kind"], last.changed) == ("resume", "mail", 1)


async def test_limits_are_set_and_reset(viewer: Viewer, client: JobClient) -> None:
    question = await viewer.see("/kinds/set-limits?kind=mail")
    page = await viewer.press(question, "Set", {"running": "4", "rate": "100", "per": "60"})
    assert "kind mail: 4 at once, 100 in 60 s" in page.text
    numbers = await client.limits.numbers("mail")
    assert (numbers.max_running, numbers.rate, numbers.per) == (4, 100, 60.0)
    question = await viewer.see("/kinds/set-limits?kind=mail")
    assert {"running": "4", "rate": "100", "per": "60.0"}.items() <= dict(question.forms[0].values).items()
    await viewer.press(question, "Set", {"running": "", "rate": "", "per": ""}, status=400)
    await viewer.press(question, "Set", {"running": "many"}, status=400)
    await viewer.press(await viewer.see("/kinds/reset-limits?kind=mail"), "Reset")
    assert (await client.limits.numbers("mail")).max_running is None
    assert [each.action for each in await client.audit()] == ["limits.reset", "limits.set"]
    await viewer.see("/kinds/pause?kind=No%20Kind", 400)
    await viewer.see("/kinds/pause", 400)


async def test_keys_are_listed_page_by_page(viewer: Viewer, client: JobClient) -> None:
    for number in range(101):
        await client.limits.set("mail", Limit(1), Rate(5), key=f"tenant-{number:03}")
    first = await viewer.see("/keys")
    second = await viewer.see(first.links["Next page"])
    assert "tenant-100" not in first.text
    assert "tenant-100" in second.text
    await viewer.see("/keys?after=none", 400)
    # The page goes on behind a key that is not limited any more.
    await client.limits.reset("mail", key="tenant-099")
    assert "tenant-100" in (await viewer.see(first.links["Next page"])).text
    await client.limits.set("zip", Limit(1))
    assert "tenant" not in (await viewer.see("/keys?kind=zip")).text
    assert "zip" in (await viewer.see("/keys?kind=zip")).links


async def test_without_the_right_nothing_is_offered_or_done(client: JobClient) -> None:
    await client.enqueue("mail", {})
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    page = await reader.see("/kinds")
    assert not [link for link in page.links.values() if "/pause" in link or "/enqueue" in link]
    answer: httpx.Response = await reader.http.get("/kinds/pause?kind=mail")
    assert answer.status_code == 403
    await reader.http.aclose()
