"""docs/limits.md: its code is run, and its commands do what they say."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from jsworker.core.limits import common_key

PAGE = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


def test_its_classes_have_the_limits_that_it_shows() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 -- the page's own code
    sync, rebuild = names["SyncTenant"], names["RebuildIndex"]
    assert (sync.kind, common_key(sync.limit, sync.rate)) == ("sync-tenant", "tenant")
    assert (rebuild.kind, rebuild.limit.max_running) == ("rebuild-index", 1)


@pytest.mark.usefixtures("database_url")
def test_its_commands_do_what_they_say(
    monkeypatch: pytest.MonkeyPatch, servers: Any, database_url: str
) -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    monkeypatch.setenv("JSWORKER_DATABASE_URL", database_url)
    monkeypatch.setenv("JSWORKER_NATS_URL", servers.nats.url)
    monkeypatch.setenv("JSWORKER_STREAM", "PAGE_OF_LIMITS")
    monkeypatch.setenv("JSWORKER_SUBJECT_PREFIX", "page-of-limits")
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 -- the page's own code
    asyncio.run(names["by_hand"]())
    [commands] = blocks("sh")
    for line in commands.splitlines():
        assert run_command(shlex.split(line)[1:]) == 0, line
