"""The example for Django: an order, its job and its task are committed together, and shown in the admin."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.djangos import closing, django_on  # first: it sets Django up

from django.contrib.auth.models import User  # isort: skip
from django.core.management import call_command
from django.test import Client

from django_app.shop.jobs import WriteReceipt
from jsworker import Settings, Worker
from jsworker.contrib.django import fresh_connections
from jsworker.contrib.django.tasks import DjangoTask
from tests.support.polling import eventually
from tests.worker.conftest import pace, patient, rows
from tests.worker.rows import Rows

__all__ = ["pace", "patient", "rows"]

pytestmark = [pytest.mark.usefixtures("patient"), pytest.mark.unhurried]


@pytest.fixture(autouse=True)
def _django(database_url: str) -> Iterator[None]:
    with django_on(database_url):
        yield


async def call(method: str, path: str, **data: Any) -> Any:
    """Call a view, in a thread, as a server does."""
    return await asyncio.to_thread(closing, getattr(Client(), method), path, data)


async def test_an_order_gets_its_receipt_and_its_thanks(settings: Settings, rows: Rows) -> None:
    placed = (await call("post", "/orders/", item="tea", cents=250)).json()
    assert (await call("get", f"/orders/{placed['order']}/")).json() == {"receipt": "", "thanked": False}
    async with Worker([WriteReceipt, DjangoTask], settings, middleware=[fresh_connections]):

        async def done() -> None:
            found = (await call("get", f"/orders/{placed['order']}/")).json()
            assert found == {"receipt": "tea: 2.50", "thanked": True}

        await eventually(done, seconds=60)
        await rows.becomes(placed["job"], "completed")
        row = await rows.becomes(placed["thanks"], "completed")
    assert row["result"] == f"thanks for order {placed['order']}"


async def test_an_order_that_is_refused_leaves_no_job(rows: Rows) -> None:
    with pytest.raises(Exception, match="cents"):
        await call("post", "/orders/", item="air", cents=-1)
    assert await rows.query("SELECT id FROM jsworker.jobs") == []


def test_the_admin_shows_orders_and_jobs_and_changes_none() -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("admin"))
    placed = client.post("/orders/", {"item": "tea", "cents": 250}).json()
    page = f"/admin/jsworker/storedjob/{placed['job']}/change/"
    assert f'<a href="{page}">' in client.get("/admin/shop/order/").content.decode()
    listing = client.get("/admin/jsworker/storedjob/", {"status__exact": "queued"}).content.decode()
    assert placed["job"] in listing
    shown = client.get(page).content.decode()
    assert "write-receipt" in shown
    assert 'name="_save"' not in shown
    assert client.get("/admin/jsworker/storedjob/", {"q": "write-receipt"}).content.decode().count(page) == 1
    for refused in (page, page.replace("change", "delete"), "/admin/jsworker/storedjob/add/"):
        assert client.post(refused, {"kind": "other"}).status_code == 403


def test_it_needs_no_migration_that_is_not_there() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    call_command("check", fail_level="WARNING")
