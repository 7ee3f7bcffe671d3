"""docs/django.md: its settings are taken, its code enqueues and works."""

import asyncio
import re
import sys
from collections.abc import Iterator

import pytest

from tests.support.djangos import closing, django_on  # first: it sets Django up
from tests.support.documents import Page, names_of

from django.test import override_settings  # isort: skip

try:
    from django.tasks import task_backends
except ImportError:  # before Django 6.0
    from django_tasks import task_backends

import django_app.shop.jobs
from jsworker import Worker
from jsworker.cli.app import _COMMANDS
from jsworker.contrib.django import enqueue, fresh_connections
from jsworker.contrib.django.configuration import check_configuration, jsworker_settings
from jsworker.core.settings import Settings
from tests.worker.rows import Rows

PAGE = Page("docs/django.md")
SETTINGS, ENQUEUES, JOBS, TASKS, _TESTS = PAGE.blocks("python")


@pytest.fixture(autouse=True)
def _django(database_url: str) -> Iterator[None]:
    with django_on(database_url):
        yield


def test_its_settings_are_taken(settings: Settings) -> None:
    with override_settings(JSWORKER=names_of(SETTINGS)["JSWORKER"]):
        assert check_configuration() == []
        found = jsworker_settings()
        assert (found.concurrency, found.database_dsn()) == (4, settings.database_dsn())
    with override_settings(TASKS=names_of(TASKS)["TASKS"]):
        assert list(task_backends["default"].check()) == []


async def test_its_code_enqueues_and_works(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", ".models", ".jobs"):
        monkeypatch.setitem(sys.modules, f"shop{name}", sys.modules[f"{django_app.shop.__name__}{name}"])
    names = names_of(ENQUEUES, JOBS)
    order = await asyncio.to_thread(closing, names["place_order"], "tea", 250)
    row = await rows.job(order.job_id)
    assert (row["kind"], row["unique_key"]) == ("write-receipt", f"receipt-{order.pk}")
    job = await asyncio.to_thread(closing, enqueue, names["Greet"], {"order": order.pk})
    kinds = [names["WriteReceipt"], names["Greet"]]
    async with Worker(kinds, settings, middleware=[fresh_connections]):
        assert (await rows.becomes(job.id, "completed"))["result"] == "thanks for tea"
        await rows.becomes(order.job_id, "completed")


def test_the_commands_that_it_names_are_there() -> None:
    named = set(re.findall(r"(?:`jsworker|manage.py jsworker) ([a-z-]+)", PAGE.text))
    assert named <= set(_COMMANDS)
    assert {"limits", "pause", "jobs", "run"} <= named
