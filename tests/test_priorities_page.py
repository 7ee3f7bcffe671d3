"""docs/priorities.md: its code is run, its commands do what they say."""

import asyncio
import re
import secrets
import shlex
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient

PAGE = (Path(__file__).parents[1] / "docs" / "priorities.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, servers: Any, database_url: str) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", database_url)
    monkeypatch.setenv("JSWORKER_NATS_URL", servers.nats.url)
    unique = secrets.token_hex(4)
    monkeypatch.setenv("JSWORKER_STREAM", f"PAGE_{unique}")
    monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", f"page-{unique}")


async def priorities() -> list[tuple[str, str]]:
    async with JobClient.from_env() as client:
        return sorted((job.kind, job.priority) for job in await client.list())


@pytest.mark.usefixtures("environment")
def test_its_code_enqueues_what_it_says() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 -- the page's own code
    asyncio.run(names["enqueue"]())
    found = asyncio.run(priorities())
    assert found == [("count-words", "high"), ("count-words", "low"), ("tidy-up", "low"), ("tidy-up", "low")]


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    monkeypatch.setenv("COLUMNS", "200")

    [commands] = blocks("sh")
    first, *others = commands.splitlines()
    assert run_command(shlex.split(first)[1:]) == 0
    job_id = capsys.readouterr().out.strip()
    for line in others:
        assert run_command(shlex.split(line.replace("ID", job_id))[1:]) == 0, line
    shown = capsys.readouterr().out
    assert f"{job_id} low" in shown
    assert re.search(r"queued +0/- +\S+ +low", shown)
    assert f"{job_id} cancelled" in shown
