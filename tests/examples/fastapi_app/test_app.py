"""The example for FastAPI, tested as its users would test it: by ``jsworker.testing``."""

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from fastapi_app.app import app
from fastapi_app.database import Order
from fastapi_app.jobs import Receipt, WriteReceipt
from jsworker import Fail, JobClient, Settings
from jsworker.testing import assert_enqueued, kill_worker_during, run_job, work_until_empty
from tests.support.polling import eventually

Sql = psycopg.Connection[dict[str, object]]


@pytest.fixture
def sql(jsworker_settings: Settings) -> Iterator[Sql]:
    """A connection to the test's database."""
    url = jsworker_settings.database_dsn()
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
async def http(jsworker_settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the application, which finds the servers of the test in the environment."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
    ):
        yield client


async def test_an_order_gets_its_receipt(http: httpx.AsyncClient, sql: Sql) -> None:
    answer = await http.post("/orders", json={"item": "tea", "cents": 250})
    assert answer.status_code == 202
    placed = answer.json()
    await assert_enqueued(WriteReceipt, {"order_id": placed["order_id"]}, count=1)
    status = (await http.get(f"/jobs/{placed['job_id']}")).json()
    assert status == {"status": "queued", "progress": None, "attempts": 0, "error": None}

    async def published() -> None:
        assert sql.execute("SELECT needs_publish FROM jsworker.jobs").fetchall() == [{"needs_publish": False}]

    await eventually(published)
    assert (await http.get(f"/jobs/{placed['job_id']}/result", params={"seconds": 0.1})).status_code == 504
    done = await work_until_empty([WriteReceipt], timeout=120)
    assert done.completed == {"write-receipt": 1}
    result = await http.get(f"/jobs/{placed['job_id']}/result", params={"seconds": 30})
    assert result.json() == {"receipt": "tea: 2.50"}
    orders = sql.execute("SELECT id, receipt FROM orders").fetchall()
    assert orders == [{"id": placed["order_id"], "receipt": "tea: 2.50"}]


async def test_without_the_order_there_is_no_job(
    http: httpx.AsyncClient, job_client: JobClient, sql: Sql
) -> None:
    sql.execute("ALTER TABLE orders ADD CHECK (cents > 0)")
    with pytest.raises(Exception, match="orders_cents_check"):
        await http.post("/orders", json={"item": "air", "cents": 0})
    assert await job_client.list() == []


async def test_a_receipt_that_cannot_be_written_is_told(http: httpx.AsyncClient, sql: Sql) -> None:
    placed = (await http.post("/orders", json={"item": "tea", "cents": 250})).json()
    sql.execute("DELETE FROM orders")
    with pytest.raises(Fail, match="there is no order"):
        await work_until_empty([WriteReceipt], timeout=120)
    status = (await http.get(f"/jobs/{placed['job_id']}")).json()
    assert (status["status"], status["error"]) == ("failed", f"there is no order {placed['order_id']}")
    assert (await http.get(f"/jobs/{placed['job_id']}/result")).status_code == 409
    assert (await http.get(f"/jobs/{uuid4()}")).status_code == 404
    assert (await http.get(f"/jobs/{uuid4()}/result")).status_code == 404


async def test_a_receipt_is_written_in_the_transaction_of_its_order(http: httpx.AsyncClient) -> None:
    placed = (await http.post("/orders", json={"item": "tea", "cents": 250})).json()
    async with app.state.sessions() as session:
        run = await run_job(WriteReceipt, Receipt(order_id=placed["order_id"]), session=session)
        order = await session.get_one(Order, placed["order_id"])
        assert (run.result, order.receipt) == ({"receipt": "tea: 2.50"}, "tea: 2.50")
        await session.rollback()
        await session.refresh(order)
        assert order.receipt is None


async def test_a_worker_that_is_killed_writes_one_receipt(http: httpx.AsyncClient, sql: Sql) -> None:
    placed = (await http.post("/orders", json={"item": "tea", "cents": 250})).json()
    killed = await kill_worker_during(WriteReceipt, Receipt(order_id=placed["order_id"]), timeout=120)
    assert (killed.status, killed.result) == ("completed", {"receipt": "tea: 2.50"})
    assert sql.execute("SELECT receipt FROM orders").fetchall() == [{"receipt": "tea: 2.50"}]
