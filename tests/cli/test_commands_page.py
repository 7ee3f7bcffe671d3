"""docs/cli.md is what the command line says of itself; each command's help has an example."""

import pytest

from .commands import Cli
from .document_commands import PAGE, commands, page

COMMANDS = dict(commands())


def test_the_page_is_in_step() -> None:
    assert PAGE.read_text() == page(), "python -m tests.cli.document_commands docs/cli.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example_of_itself(name: str) -> None:
    examples = [part for part in str(COMMANDS[name].help).split("\n\n") if part.startswith("Example: ")]
    shown = "workflow 0" if name == "workflow show" else name
    assert len(examples) == 1
    assert f"`jsworker {shown}" in examples[0] + " "


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_understood(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = cli(*name.split(), "--help").ok()
    assert "Example:" in found.out
    assert max(map(len, found.lines)) <= 80
