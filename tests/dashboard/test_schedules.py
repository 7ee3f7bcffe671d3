from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.schedule_rules import Cron, Every
from jsworker.dashboard.pages import schedules
from jsworker.ownership.transitions.schedules import list_schedules
from tests.dashboard.viewer import Viewer
from tests.worker.rows import Rows

EVIL = "'\"><script>alert(1)</script>"


async def test_schedules_are_listed_run_paused_and_resumed(
    viewer: Viewer, client: JobClient, rows: Rows
) -> None:
    await client.schedules.add("nightly", "report", Cron("0 3 * * *", "Europe/Berlin"))
    await client.schedules.add(EVIL, "report", Every(seconds=3600))
    await rows.query(
        "UPDATE jsworker.schedules SET next_at = now() - interval '5 min' WHERE name = 'nightly'"
    )
    page = await viewer.see("/schedules")
    assert "0 3 * * * Europe/Berlin" in page.text
    assert "late by 5 m" in page.text
    assert EVIL in page.text
    page = await viewer.press(await viewer.see("/schedules/run-now?name=nightly"), "Run now")
    assert "1 job of schedule nightly is enqueued" in page.text
    assert [job.kind for job in await client.list()] == ["report"]
    page = await viewer.press(await viewer.see("/schedules/pause?name=nightly"), "Pause")
    assert "schedule nightly is paused" in page.text
    assert "/schedules/resume?name=nightly" in page.links.values()
    question = await viewer.see("/schedules/resume?name=nightly")
    assert "schedule nightly is due at" in (await viewer.press(question, "Resume")).text
    await viewer.press(await viewer.see("/schedules/pause?name=gone"), "Pause", status=409)
    await viewer.see("/schedules/pause", 400)
    done = [(each.action, each.target["schedule"], each.changed) for each in await client.audit(limit=3)]
    assert done == [
        ("schedules.resume", "nightly", 1),
        ("schedules.pause", "nightly", 1),
        ("schedules.run_now", "nightly", 1),
    ]


async def test_no_more_schedules_are_read_than_are_shown(
    viewer: Viewer, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    async def counted(*arguments: Any, **options: Any) -> Any:
        found = await list_schedules(*arguments, **options)
        read.append(len(found))
        return found

    monkeypatch.setattr(schedules, "list_schedules", counted)
    monkeypatch.setattr(schedules, "_SHOWN", 2)
    for name in ("a", "b"):
        await client.schedules.add(name, "report", Every(seconds=3600))
    assert "Others are due later." not in (await viewer.see("/schedules")).text
    for name in ("c", "d"):
        await client.schedules.add(name, "report", Every(seconds=7200))
    page = await viewer.see("/schedules")
    assert "Others are due later." in page.text
    assert page.text.count("report") == 2
    assert read == [2, 3]
    assert len(await client.schedules.list()) == 4
