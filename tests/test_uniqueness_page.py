"""docs/uniqueness.md: its code and its commands are run."""

import asyncio

import pytest

from tests.support.documents import Page, run_line

pytestmark = pytest.mark.usefixtures("environment")

PAGE = Page("docs/uniqueness.md")


def test_its_code_enqueues() -> None:
    asyncio.run(PAGE.names()["enqueue"]())


def test_its_commands_do_what_they_say() -> None:
    for commands in PAGE.blocks("sh"):
        for line in commands.splitlines():
            assert run_line(line) == 0, line
