"""The guides' pages: the files that they show, and the commands that they run."""

import re
from pathlib import Path
from typing import Final, NamedTuple

DOCS: Final = Path(__file__).parents[2] / "docs"
FOLDERS: Final = ("start", "tutorial", "concepts", "migrate", "operate", "contributing")
"""The folders whose pages are written and tested as these modules say."""

_PYTHON = re.compile(r"(?ms)^```python[^\n]*\n.*?^```$")
_FILE = re.compile(r'(?ms)^```python title="([\w/]+\.py)"\n(.*?)^```$')
_CONSOLE = re.compile(r"(?ms)(?:^<!-- (?P<how>[^\n]*) -->\n)?^```console\n(?P<text>.*?)^```$")
_UNTIL = re.compile(r'until "(.*)"')


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        line: what is typed behind the prompt.
        background: it runs on until the session ends.
        until: it is repeated until this is printed; empty: it runs once, and must succeed.
        start, end: where its output stands in the page.
    """

    line: str
    background: bool
    until: str
    start: int
    end: int


def files_of(page: str) -> dict[str, str]:
    """Return the Python files that a page shows, by their names. Each of its Python blocks is one."""
    text = (DOCS / page).read_text()
    files = _FILE.findall(text)
    assert len(files) == len(_PYTHON.findall(text)), f"{page}: a block has no title"
    whole = [name for name, _ in files if "/" not in name]  # the others are excerpts
    assert len(whole) == len(set(whole)), f"{page}: a title stands twice"
    return dict(files)


def commands_of(text: str) -> list[Command]:
    """Return the commands of a page's text: lines of ``console`` blocks that begin with a dollar sign.

    A comment before a block says how its commands run: ``<!-- background -->``, ``<!-- until "TEXT" -->``.
    """
    commands: list[Command] = []
    for block in _CONSOLE.finditer(text):
        how = block["how"] or ""
        until = _UNTIL.fullmatch(how)
        prompts = list(re.finditer(r"(?m)^\$ (.*)\n", block["text"]))
        for prompt, following in zip(prompts, [*prompts[1:], None], strict=True):
            start = block.start("text") + prompt.end()
            end = block.end("text") if following is None else block.start("text") + following.start()
            commands.append(Command(prompt[1], how == "background", until[1] if until else "", start, end))
    return commands
