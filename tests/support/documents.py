"""Pages of the documentation: their text, their code, and what that code defines."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Page:
    """A page, by its path in the repository."""

    def __init__(self, path: str | Path) -> None:
        self.text = (ROOT / path).read_text()

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"(?ms)^```{language}\b[^\n]*\n(.*?)^```$", self.text)

    def names(self) -> dict[str, Any]:
        """Run the page's Python, one block after the other, and return what it defines."""
        return names_of(*self.blocks("python"))


def names_of(*blocks: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(block, names)  # noqa: S102 -- the page's own code
    return names


def run_line(line: str) -> int:
    """Run a line that calls ``jsworker`` in this process, and return its exit code."""
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    return run_command(shlex.split(line)[1:])
