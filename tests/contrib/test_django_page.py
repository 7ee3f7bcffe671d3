"""docs/django.md: its settings are taken, its code enqueues and works."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.djangos import closing, django_on  # first: it sets Django up

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

PAGE = (Path(__file__).parents[2] / "docs" / "django.md").read_text()
SETTINGS, ENQUEUES, JOBS, TASKS = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)


@pytest.fixture(autouse=True)
def _django(database_url: str) -> Iterator[None]:
    with django_on(database_url):
        yield


def of(block: str) -> dict[str, Any]:
    defined: dict[str, Any] = {"__name__": "page"}
    exec(block, defined)  # noqa: S102 -- the page's own code
    return defined


def test_its_settings_are_taken(settings: Settings) -> None:
    with override_settings(**{name: value for name, value in of(SETTINGS).items() if name == "JSWORKER"}):
        assert check_configuration() == []
        found = jsworker_settings()
        assert (found.concurrency, found.database_dsn()) == (4, settings.database_dsn())
    with override_settings(TASKS=of(TASKS)["TASKS"]):
        assert list(task_backends["default"].check()) == []


async def test_its_code_enqueues_and_works(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", ".models", ".jobs"):
        monkeypatch.setitem(sys.modules, f"shop{name}", sys.modules[f"{django_app.shop.__name__}{name}"])
    names = of(ENQUEUES + JOBS)
    order = await asyncio.to_thread(closing, names["place_order"], "tea", 250)
    row = await rows.job(order.job_id)
    assert (row["kind"], row["unique_key"]) == ("write-receipt", f"receipt-{order.pk}")
    job = await asyncio.to_thread(closing, enqueue, names["Greet"], {"order": order.pk})
    kinds = [names["WriteReceipt"], names["Greet"]]
    async with Worker(kinds, settings, middleware=[fresh_connections]):
        assert (await rows.becomes(job.id, "completed"))["result"] == "thanks for tea"
        await rows.becomes(order.job_id, "completed")


def test_the_commands_that_it_names_are_there() -> None:
    named = set(re.findall(r"(?:`jsworker|manage.py jsworker) ([a-z-]+)", PAGE))
    assert named <= set(_COMMANDS)
    assert {"limits", "pause", "jobs", "run"} <= named
