"""docs/functions.md: its code is run as it stands, by the command that it names."""

import asyncio
import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jsworker.core.functions import FunctionProcessor
from jsworker.embedded import start_with_parent
from tests.support.documents import Page

PAGE = Page("docs/functions.md")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: None) -> Iterator[Any]:
    """The page's module, in the working directory."""
    [code] = PAGE.blocks("python")
    (tmp_path / "words.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("words")
    del sys.modules["words"]


def test_its_code_and_its_command_do_what_they_say(words: Any) -> None:
    [command] = PAGE.blocks("sh")
    worker = start_with_parent([sys.executable, "-m", *shlex.split(command)])
    try:
        count, text = asyncio.run(words.enqueue())
    finally:
        worker.terminate()
        worker.wait(60)
    assert (count, text) == (4, words.Text(text="TO BE"))


async def test_what_it_says_of_the_class(words: Any) -> None:
    assert issubclass(words.count_words, FunctionProcessor)
    assert (words.count_words.kind, words.translate.max_attempts) == ("count-words", 3)
    assert await words.count_words.function(words.Text(text="to be")) == 2
