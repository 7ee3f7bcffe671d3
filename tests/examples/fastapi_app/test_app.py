"""The example for FastAPI: an order and its job are committed together, and the job writes the receipt."""

from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest

from fastapi_app.app import app
from fastapi_app.jobs import WriteReceipt
from jsworker import Settings, Worker
from tests.support.polling import eventually
from tests.worker.conftest import pace, patient, rows
from tests.worker.rows import Rows

__all__ = ["pace", "patient", "rows"]

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


@pytest.fixture
async def http(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the application, which has the servers of the test."""
    for name in ("nats_url", "stream", "subject_prefix"):
        monkeypatch.setenv(f"JSWORKER_{name.upper()}", getattr(settings, name))
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
    ):
        yield client


async def test_an_order_gets_its_receipt(http: httpx.AsyncClient, rows: Rows, settings: Settings) -> None:
    answer = await http.post("/orders", json={"item": "tea", "cents": 250})
    assert answer.status_code == 202
    placed = answer.json()
    status = (await http.get(f"/jobs/{placed['job_id']}")).json()
    assert status == {"status": "queued", "progress": None, "attempts": 0, "error": None}
    assert (await rows.job(placed["job_id"]))["needs_publish"] is False
    assert (await http.get(f"/jobs/{placed['job_id']}/result", params={"seconds": 0.1})).status_code == 504
    async with Worker([WriteReceipt], settings):
        result = await http.get(f"/jobs/{placed['job_id']}/result", params={"seconds": 30})
    assert result.json() == {"receipt": "tea: 2.50"}
    assert await rows.query("SELECT id, receipt FROM orders") == [
        {"id": placed["order_id"], "receipt": "tea: 2.50"}
    ]


async def test_without_the_order_there_is_no_job(http: httpx.AsyncClient, rows: Rows) -> None:
    await rows.query("ALTER TABLE orders ADD CHECK (cents > 0)")
    with pytest.raises(Exception, match="orders_cents_check"):
        await http.post("/orders", json={"item": "air", "cents": 0})
    assert await rows.query("SELECT id FROM jsworker.jobs") == []


async def test_a_receipt_that_cannot_be_written_is_told(
    http: httpx.AsyncClient, rows: Rows, settings: Settings
) -> None:
    placed = (await http.post("/orders", json={"item": "tea", "cents": 250})).json()
    await rows.query("DELETE FROM orders")
    async with Worker([WriteReceipt], settings):

        async def failed() -> None:
            status = (await http.get(f"/jobs/{placed['job_id']}")).json()
            assert (status["status"], status["error"]) == (
                "failed",
                f"there is no order {placed['order_id']}",
            )

        await eventually(failed, seconds=60)
    assert (await http.get(f"/jobs/{placed['job_id']}/result")).status_code == 409
    assert (await http.get(f"/jobs/{uuid4()}")).status_code == 404
    assert (await http.get(f"/jobs/{uuid4()}/result")).status_code == 404
