from uuid import UUID

import pytest

from jsworker.client import JobClient
from tests.dashboard.browsing import EVIL, browsing
from tests.worker.rows import Rows

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


async def enqueued(client: JobClient) -> UUID:
    async with client.workflow(f"nightly {EVIL}") as flow:
        parts = flow.batch("count", [{"n": number} for number in range(3)])
        flow.job("merge", {}, after=parts, name=EVIL)
    return flow.id


async def test_the_list_and_the_graph(client: JobClient) -> None:
    workflow = await enqueued(client)
    async with browsing(client) as browser:
        page = await browser.page("/workflows")
        assert f"/workflows/{workflow}" in page.links()
        assert "0 of 2" in page.text
        page = await browser.page(f"/workflows/{workflow}")
        assert [found["class"] for tag, found in page.tags if tag == "svg"] == ["workflow"]
        assert f"/workflows/{workflow}#node-1" in page.links()
        assert "3 queued" in page.text
        assert "1 held" in page.text
        await browser.page(f"/workflows/{UUID(int=1)}", 404)
        await browser.page("/workflows?after=none", 400)


async def test_cancel_and_retry(client: JobClient, rows: Rows) -> None:
    workflow = await enqueued(client)
    async with browsing(client) as browser:
        question = await browser.page(f"/workflows/{workflow}/cancel")
        assert "Cancel 4 jobs of the workflow?" in question.text
        page = await browser.answer(question, f"/workflows/{workflow}/cancel")
        assert "4 jobs cancelled, 0 asked to stop" in page.text
        assert "/cancel" not in "".join(page.links()) or page.status == 200
        failed = await enqueued(client)
        await rows.execute(
            "UPDATE jsworker.jobs SET status = 'failed', finished_at = now(), needs_publish = false, attempts = 1,"
            " errors = 1, last_error = 'ValueError: no' WHERE kind = 'count' AND status = 'queued'"
        )
        assert "ValueError: no" in (await browser.page(f"/workflows/{failed}")).text
        page = await browser.act(f"/workflows/{failed}/retry")
        assert "3 jobs retried" in page.text
    done = [(each.action, each.target["workflow"], each.changed) for each in await client.audit(limit=2)]
    assert done == [("workflows.retry", str(failed), 3), ("workflows.cancel", str(workflow), 1)]
