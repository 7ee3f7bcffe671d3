"""docs/workflows.md: its code runs as it says, and its commands do what they say."""

from typing import Any

import pytest

from jsworker import JobClient
from tests.support.documents import Page, run_line
from tests.worker.conftest import start
from tests.worker.running import StartWorker

__all__ = ["start"]

PAGE = Page("docs/workflows.md")


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's code defines."""
    return PAGE.names()


@pytest.mark.usefixtures("environment")
async def test_its_code_counts_words(names: dict[str, Any], start: StartWorker) -> None:
    await start(*(names[name] for name in ("CountPart", "FetchRates", "Merge", "Crawl")))
    assert await names["count"](["one two", "three", "four five six"]) == {"words": 6}


@pytest.mark.usefixtures("environment")
async def test_its_crawler_adds_members(names: dict[str, Any], start: StartWorker, client: JobClient) -> None:
    await start(names["Crawl"])
    async with client.workflow("crawl") as flow:
        flow.job(names["Crawl"], {"links": ["a", "b"]})
        flow.job(names["Crawl"], {}, after="crawl", name="last")
    assert await flow.result(timeout=60) is None
    assert (await client.workflows.get(flow.id))["nodes"][0]["jobs"] == {"completed": 3}


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio  # noqa: PLC0415

    async def enqueued() -> str:
        async with JobClient.from_env() as client, client.workflow("count words") as flow:
            flow.job(names["CountPart"], {"words": []})
        return str(flow.id)

    workflow = asyncio.run(enqueued())
    [commands] = PAGE.blocks("sh")
    for line in commands.splitlines():
        refused = "retry" in line  # nothing has failed
        assert run_line(line.replace("ID", workflow)) == int(refused), line
    assert "count words" in capsys.readouterr().out
