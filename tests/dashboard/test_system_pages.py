"""Workers, the doctor, the audit."""

import pytest

from jsworker.client import JobClient
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.dashboard import Access
from tests.dashboard.browsing import EVIL, browsing
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


class Quick(JobProcessor):
    kind = "quick"

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError


async def test_workers_stand_together_by_host(client: JobClient, rows: Rows, start: StartWorker) -> None:
    running = await start(Quick)
    await rows.execute(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state,"
        " last_seen_at) VALUES (%s, %s, 7, ARRAY['quick'], 3, '0.0', '1 s', 'running', now() - interval '1 day')",
        f"old {EVIL}",
        EVIL,
    )
    async with browsing(client) as browser:
        page = await browser.page("/workers")
    assert running.worker.id in page.text
    assert "silent" in page.text
    assert page.text.count("1 process,") == 2
    assert "0 of 3 slots busy" in page.text


async def test_the_doctor_examines_when_asked(client: JobClient, start: StartWorker) -> None:
    await start(Quick)
    async with browsing(client) as browser:
        assert "What was found" not in (await browser.page("/doctor")).text
        page = await browser.page("/doctor?examine=yes")
        assert "PostgreSQL" in page.text
        assert "checks found nothing" in page.text
        page = await browser.act("/doctor/repair")
        assert "there was nothing that may be mended without you" in page.text
    [last, *_] = await client.audit()
    assert (last.action, last.changed) == ("doctor.repair", 0)


async def test_the_audit_lists_who_did_what(client: JobClient) -> None:
    for number in range(51):
        await client.pause(f"kind-{number}", actor=EVIL)
    viewer = Access(frozenset({"pause"}), name="ada")
    async with browsing(client, authorize=lambda _: viewer) as browser:
        await browser.act("/kinds/pause?kind=mail", reason=EVIL)
        page = await browser.page("/audit")
        assert "ada login" in page.text
        assert "kind mail, reason" in page.text
        assert "kind-0 " not in page.text
        [behind] = [link for link in page.links() if "after=" in link]
        assert "kind-0" in (await browser.page(behind)).text
        await browser.page("/audit?after=x", 400)
