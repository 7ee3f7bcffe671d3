from uuid import UUID

from jsworker import JobClient
from jsworker.dashboard import Access, dashboard
from tests.dashboard.viewer import Viewer
from tests.worker.rows import Rows

EVIL = "'\"><script>alert(1)</script>"


async def enqueued(client: JobClient) -> UUID:
    async with client.workflow(f"nightly {EVIL}") as flow:
        parts = flow.batch("count", [{"n": number} for number in range(3)])
        flow.job("merge", {}, after=parts, name=EVIL)
    return flow.id


async def test_the_list_and_the_graph(viewer: Viewer, client: JobClient) -> None:
    workflow = await enqueued(client)
    page = await viewer.see("/workflows")
    assert f"/workflows/{workflow}" in page.links.values()
    assert "0 of 2" in page.text
    page = await viewer.see(f"/workflows/{workflow}")
    assert [found["class"] for tag, found in page.elements if tag == "svg"] == ["workflow"]
    assert f"/workflows/{workflow}#node-1" in page.links.values()
    assert "3 queued" in page.text
    assert "1 held" in page.text
    assert not [found for tag, found in page.elements if tag == "script" and "src" not in found]
    [first, *_] = await client.list(kind="count")
    assert (await viewer.see(f"/jobs/{first.id}")).links[f"nightly {EVIL}"] == f"/workflows/{workflow}"
    await viewer.see(f"/workflows/{UUID(int=1)}", 404)
    await viewer.see("/workflows?after=none", 400)


async def test_cancel_and_retry(viewer: Viewer, client: JobClient, rows: Rows) -> None:
    workflow = await enqueued(client)
    question = await viewer.see(f"/workflows/{workflow}/cancel")
    assert "Cancel 4 jobs of the workflow?" in question.text
    page = await viewer.press(question, "Cancel")
    assert "jobs cancelled, 0 asked to stop" in page.text
    failed = await enqueued(client)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'failed', finished_at = now(), needs_publish = false,"
        " attempts = 1, errors = 1, last_error = 'ValueError: no'"
        " WHERE batch_id IN (SELECT id FROM jsworker.batches WHERE workflow = %s AND kind = 'count')",
        failed,
    )
    assert "ValueError: no" in (await viewer.see(f"/workflows/{failed}")).text
    reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
    page = await reader.see(f"/workflows/{failed}")
    await reader.http.aclose()
    assert ("ValueError" in page.text, "ValueError: no" in page.source) == (True, False)
    page = await viewer.press(await viewer.see(f"/workflows/{failed}/retry"), "Retry 3 jobs")
    assert "3 jobs retried" in page.text
    await rows.query("UPDATE jsworker.workflows SET cancelled_at = now() WHERE id = %s", failed)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'failed', finished_at = now(), needs_publish = false,"
        " attempts = 1, errors = 1, last_error = 'ValueError: no' WHERE kind = 'count' AND status = 'queued'"
    )
    page = await viewer.see(f"/workflows/{failed}")
    assert ("3 failed" in page.text, "Cancel …" in page.links, "Retry …" in page.links) == (True, True, False)
    question = await viewer.see(f"/workflows/{failed}/retry")
    assert ("its jobs cannot be retried" in question.text, question.has("Retry")) == (True, False)
    done = [(each.action, each.target["workflow"], each.changed) for each in await client.audit(limit=2)]
    assert done == [("workflow.retry", str(failed), 3), ("workflow.cancel", str(workflow), 1)]
