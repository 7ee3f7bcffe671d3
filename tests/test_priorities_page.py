"""docs/priorities.md: its code is run, its commands do what they say."""

import asyncio
import re

import pytest

from jsworker import JobClient
from tests.support.documents import Page, run_line

PAGE = Page("docs/priorities.md")


async def priorities() -> list[tuple[str, str]]:
    async with JobClient.from_env() as client:
        return sorted((job.kind, job.priority) for job in await client.list())


@pytest.mark.usefixtures("environment")
def test_its_code_enqueues_what_it_says() -> None:
    asyncio.run(PAGE.names()["enqueue"]())
    found = asyncio.run(priorities())
    assert found == [("count-words", "high"), ("count-words", "low"), ("tidy-up", "low"), ("tidy-up", "low")]


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    [commands] = PAGE.blocks("sh")
    first, *others = commands.splitlines()
    assert run_line(first) == 0
    job_id = capsys.readouterr().out.strip()
    for line in others:
        assert run_line(line.replace("ID", job_id)) == 0, line
    shown = capsys.readouterr().out
    assert f"{job_id} low" in shown
    assert re.search(r"queued +0/- +\S+ +low", shown)
    assert f"{job_id} cancelled" in shown
