"""docs/limits.md: its code is run, and its commands do what they say."""

import asyncio

import pytest

from jsworker.core.limits import common_key
from tests.support.documents import Page, run_line

PAGE = Page("docs/limits.md")


def test_its_classes_have_the_limits_that_it_shows() -> None:
    names = PAGE.names()
    sync, rebuild = names["SyncTenant"], names["RebuildIndex"]
    assert (sync.kind, common_key(sync.limit, sync.rate)) == ("sync-tenant", "tenant")
    assert (rebuild.kind, rebuild.limit.max_running) == ("rebuild-index", 1)


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say() -> None:
    asyncio.run(PAGE.names()["by_hand"]())
    [commands] = PAGE.blocks("sh")
    for line in commands.splitlines():
        assert run_line(line) == 0, line
