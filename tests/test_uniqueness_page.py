"""docs/uniqueness.md: its code and its commands are run."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "uniqueness.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


@pytest.fixture(autouse=True)
def _servers(monkeypatch: pytest.MonkeyPatch, servers: Any, database_url: str) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", database_url)
    monkeypatch.setenv("JSWORKER_NATS_URL", servers.nats.url)
    name = f"page-{uuid4().hex[:8]}"  # a stream belongs to one database
    monkeypatch.setenv("JSWORKER_STREAM", name)
    monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", name)


def test_its_code_enqueues() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 -- the page's own code
    asyncio.run(names["enqueue"]())


def test_its_commands_do_what_they_say() -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    for commands in blocks("sh"):
        for line in commands.splitlines():
            assert run_command(shlex.split(line)[1:]) == 0, line
