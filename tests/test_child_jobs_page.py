"""docs/child-jobs.md: its code does what it says."""

from jsworker import JobClient
from tests.support.documents import Page
from tests.worker.conftest import rows, start
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

__all__ = ["rows", "start"]

PAGE = Page("docs/child-jobs.md")


async def test_its_code_works(client: JobClient, start: StartWorker, rows: Rows) -> None:
    found = PAGE.names()
    await start(found["Order"], found["Ship"], scripted(echo, kind="track"))
    job = await client.enqueue(found["Order"], {"items": ["a", "b"]})
    assert await job.result(60) == 2
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE kind = 'ship'") == 2
    for child in await client.list(kind="ship"):
        assert (await client.result(child.id, 60)).startswith("shipped ")
    assert {row.kind for row in await client.list(kind="track")} == {"track"}
    [reminder] = await client.list(kind="remind")
    assert (reminder.status, reminder.unique_key) == ("scheduled", f"remind {job.id}")
