"""docs/sync.md: its code works from threads, and names what there is."""

import asyncio
import re

import pytest

from jsworker import SyncJobClient
from jsworker.core.settings import Settings
from tests.support.documents import Page
from tests.worker.conftest import start
from tests.worker.processors import echo, scripted
from tests.worker.running import StartWorker

__all__ = ["start"]

PAGE = Page("docs/sync.md")


@pytest.mark.parametrize("with_nats", [True, False])
async def test_its_code_works(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, start: StartWorker, *, with_nats: bool
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", settings.subject_prefix)
    monkeypatch.setenv("JSWORKER_STREAM", settings.stream)
    if with_nats:
        monkeypatch.setenv("JSWORKER_NATS_URL", settings.nats_url)
    await start(scripted(echo, kind="send-receipt"), scripted(echo, kind="send-report"))
    found = PAGE.names()

    def use() -> None:
        assert found["jobs"].get(found["order"](7)).unique_key == "order 7"
        assert found["order_and_wait"](8) == {"order": 8}
        assert found["nightly"]() == {}
        found["jobs"].close()

    await asyncio.to_thread(use)


def test_it_names_all_there_is() -> None:
    [sentence] = re.findall(r"(?s)Methods, arguments.*?\n\n", PAGE.text)
    public = {name for name in dir(SyncJobClient) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", sentence)) - {"JobClient"} == (public | {"events"}) - {
        "open",
        "close",
        "from_env",
        "unpublished_because",
    }
