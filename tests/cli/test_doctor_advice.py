"""What doctor advises can be done: its commands, settings, events and documents exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jsworker.cli import doctor as command
from jsworker.core.events import EVENT_NAMES
from jsworker.core.settings import Settings
from jsworker.core.settings.variables import variable_of
from jsworker.doctor import checks
from jsworker.ownership import database

from .commands import Cli

ROOT = Path(__file__).parents[2]
SOURCES = [*Path(checks.__file__).parent.glob("*.py"), Path(command.__file__), Path(database.__file__)]
IN_PLACE_OF = {"MODULE:CLASS": "cli_jobs:Double", "SECONDS": "86400", "KIND": "double", "…": "why", "ID": "1"}
QUESTIONS = {"retry", "cancel", "clear"}


def texts() -> Iterator[str]:
    """Every text in these files, with a word in place of each value that is put into it."""
    for source in SOURCES:
        parts = set()
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts |= {id(part) for part in node.values}
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "double" for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield node.value


def advised(pattern: str) -> set[str]:
    return {found for text in texts() for found in re.findall(pattern, text)}


def test_every_kind_of_advice_is_found() -> None:
    commands = {line.split()[0] for line in advised(r"`jsworker ([^`]+)`")}
    assert commands >= {"run", "db", "jobs", "retry", "cancel", "clear", "prune", "dead-messages", "doctor"}
    assert advised(r"\bJSWORKER_\w+") >= {"JSWORKER_STREAM_REPLICAS", "JSWORKER_GRACE_PERIOD"}


@pytest.mark.usefixtures("sql", "here")
@pytest.mark.parametrize("line", sorted(advised(r"`jsworker ([^`]+)`")))
def test_the_command_does_something(cli: Cli, line: str) -> None:
    """A command that exists and lacks an argument is refused by itself, with exit code 2."""
    words = [IN_PLACE_OF.get(word, word) for word in line.split()]
    if words[0] == "run":
        words += ["--concurrency", "0"]
        assert "JSWORKER_CONCURRENCY=0" in cli(*words).refused(2)  # the only thing that is wrong with it
        return
    if words[0] in QUESTIONS or words[:2] == ["dead-messages", "replay"]:
        words.append("--yes")
    found = cli(*words)
    assert found.code != 2, found.err


def test_settings_exist() -> None:
    known = {variable_of(name) for name in Settings.model_fields} | {"JSWORKER_NATS_"}
    assert advised(r"\bJSWORKER_\w+") <= known


def test_events_exist() -> None:
    named = advised(r"\b(?:worker|job|prune|stream|row|message)\.[a-z]+\b")
    assert {"prune.failed", "worker.degraded"} <= named - {"job.transaction"} <= EVENT_NAMES


def test_documents_exist() -> None:
    assert all((ROOT / name).is_file() for name in advised(r"\bdocs/[\w./-]*\w"))
