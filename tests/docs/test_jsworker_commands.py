"""Every command of jsworker that a page names exists, and so do its options."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from jsworker.cli.app import _COMMANDS
from tests.docs.pages import DOCS

ROOT = DOCS.parent
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))

_BLOCK = re.compile(r"(?ms)^```(?:sh|console)\n(.*?)^```$")
_TYPED = re.compile(r"(?m)(?:^(?:\$ )?(?:\w+=\S+ )*| -- |manage\.py )jsworker (?!dev -- )(.*)")
_NAMED = re.compile(r"`(?:manage\.py )?jsworker (?!dev -- )([a-z-][^`]*)`")
NO_COMMANDS = {"demo"}
"""Named by the changelog as gone."""


def commands(text: str) -> list[str]:
    """Return what follows ``jsworker`` in the commands of a page."""
    blocks = "\n".join(_BLOCK.findall(text)).replace("\\\n", " ")
    named = _NAMED.findall(re.sub(r"(?ms)^```.*?^```$", "", text))
    return [*_TYPED.findall(blocks), *(" ".join(each.split()) for each in named)]


def options(names: list[str]) -> tuple[list[str], set[str]]:
    """Return the words of a command that are no names of it, and the options that it takes."""
    command: Any = get_command(importlib.import_module(f"jsworker.cli.{_COMMANDS[names[0]].module}").app)
    command = getattr(command, "commands", {}).get(names[0], command)
    words = names[1:]
    candidates = [command]
    if subcommands := getattr(command, "commands", {}):
        if words and words[0] in subcommands:
            candidates.append(subcommands[words[0]])
            words = words[1:]
        else:  # as `jsworker workflow ID`, which is `workflow show ID`
            candidates += subcommands.values()
    parameters = [each for one in candidates for each in one.params]
    return words, {
        "--help",
        *(option for each in parameters for option in (*each.opts, *each.secondary_opts)),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_exists(page: Path) -> None:
    for command in commands(page.read_text()):
        names = command.split("#")[0].split()
        if names[0].startswith("-") or names[0] == "COMMAND" or names[0] in NO_COMMANDS:
            continue
        assert names[0] in _COMMANDS, command
        words, known = options(names)
        given = {re.split(r"[=`|]", word)[0] for word in words if re.match(r"--[a-z]", word)}
        assert given <= known, f"jsworker {command}: {given - known}"


def test_commands_are_found_in_blocks_and_in_text() -> None:
    text = "Use `jsworker retry\nID`.\n```sh\nA=1 jsworker jobs\njsworker dev -- jsworker run x  # all\n```\n"
    assert commands(text) == ["jobs", "run x  # all", "retry ID"]
