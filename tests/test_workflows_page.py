"""docs/workflows.md: its code runs as it says, and its commands do what they say."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient
from tests.worker.conftest import start
from tests.worker.running import StartWorker

__all__ = ["start"]

PAGE = (Path(__file__).parents[1] / "docs" / "workflows.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's code defines."""
    found: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, found)  # noqa: S102 -- the page's own code
    return found


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    monkeypatch.setenv("JSWORKER_NATS_URL", str(settings.nats_url))
    monkeypatch.setenv("JSWORKER_STREAM", settings.stream)
    monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", settings.subject_prefix)


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

    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    async def enqueued() -> str:
        async with JobClient.from_env() as client, client.workflow("count words") as flow:
            flow.job(names["CountPart"], {"words": []})
        return str(flow.id)

    workflow = asyncio.run(enqueued())
    [commands] = blocks("sh")
    for line in commands.splitlines():
        refused = "retry" in line  # nothing has failed
        assert run_command(shlex.split(line.replace("ID", workflow))[1:]) == int(refused), line
    assert "count words" in capsys.readouterr().out
