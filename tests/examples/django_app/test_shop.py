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
from jsworker import JobClient, Settings
from jsworker.contrib.django.tasks import DjangoTask
from jsworker.testing import assert_enqueued, work_until_empty


@pytest.fixture(autouse=True)
def _django(jsworker_settings: Settings) -> Iterator[None]:
    with django_on(jsworker_settings.database_dsn()):
        yield


@pytest.fixture
def jsworker_settings(jsworker_settings: Settings) -> Settings:
    """The test's settings, with the middleware that ``manage.py jsworker_run`` brings."""
    return jsworker_settings.model_copy(update={"middleware": "jsworker.contrib.django:fresh_connections"})


async def call(method: str, path: str, **data: Any) -> Any:
    """Call a view, in a thread, as a server does."""
    return await asyncio.to_thread(closing, getattr(Client(), method), path, data)


async def test_an_order_gets_its_receipt_and_its_thanks(
    job_client: JobClient, jsworker_settings: Settings
) -> None:
    placed = (await call("post", "/orders/", item="tea", cents=250)).json()
    assert (await call("get", f"/orders/{placed['order']}/")).json() == {"receipt": "", "thanked": False}
    await assert_enqueued(WriteReceipt, {"order": placed["order"]}, count=1)
    done = await work_until_empty([WriteReceipt, DjangoTask], settings=jsworker_settings, timeout=120)
    assert done.completed == {"write-receipt": 1, DjangoTask.kind: 1}
    found = (await call("get", f"/orders/{placed['order']}/")).json()
    assert found == {"receipt": "tea: 2.50", "thanked": True}
    assert await job_client.result(placed["thanks"]) == f"thanks for order {placed['order']}"


async def test_an_order_that_is_refused_leaves_no_job(job_client: JobClient) -> None:
    with pytest.raises(Exception, match="cents"):
        await call("post", "/orders/", item="air", cents=-1)
    assert await job_client.list() == []


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
