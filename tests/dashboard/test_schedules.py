import pytest

from jsworker.client import JobClient
from jsworker.core.schedule_rules import Cron, Every
from tests.dashboard.browsing import EVIL, browsing
from tests.worker.rows import Rows

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


async def test_schedules_are_listed_run_paused_and_resumed(client: JobClient, rows: Rows) -> None:
    await client.schedules.add("nightly", "report", Cron("0 3 * * *", "Europe/Berlin"))
    await client.schedules.add(EVIL, "report", Every(seconds=3600))
    await rows.execute(
        "UPDATE jsworker.schedules SET next_at = now() - interval '9 s' WHERE name = 'nightly'"
    )
    async with browsing(client) as browser:
        page = await browser.page("/schedules")
        assert "0 3 * * * Europe/Berlin" in page.text
        assert "late by 9" in page.text
        page = await browser.act("/schedules/run-now?name=nightly")
        assert "1 job of schedule nightly is enqueued" in page.text
        assert [job.kind for job in await client.list()] == ["report"]
        page = await browser.act("/schedules/pause?name=nightly")
        assert "schedule nightly is paused" in page.text
        assert "/schedules/resume?name=nightly" in page.links()
        assert "schedule nightly is due at" in (await browser.act("/schedules/resume?name=nightly")).text
        assert (await browser.act("/schedules/pause?name=gone")).status == 409
        await browser.page("/schedules/pause", 400)
    done = [(each.action, each.target["schedule"], each.changed) for each in await client.audit(limit=3)]
    assert done == [
        ("schedules.resume", "nightly", 1),
        ("schedules.pause", "nightly", 1),
        ("schedules.run_now", "nightly", 1),
    ]
