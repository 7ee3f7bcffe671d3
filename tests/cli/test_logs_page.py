"""docs/logs.md: its processors run, and write the lines that it shows."""

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ownership.rows import Sql
from tests.support.documents import Page

from .commands import Cli, Spawn, Terminal

pytestmark = pytest.mark.usefixtures("here", "sql")

PAGE = Page("docs/logs.md")
FAST = ("--relay-interval", "0.1", "--scan-interval", "1")
PAYLOAD = json.dumps({"text": "hello world"})


@pytest.fixture(autouse=True)
def _processors(tmp_path: Path) -> None:
    (tmp_path / "my_jobs.py").write_text(PAGE.blocks("python")[0])


def test_json_lines_hold_the_fields_that_the_page_shows(cli: Cli, spawn: Spawn) -> None:
    cli("enqueue", "shout", "--payload", PAYLOAD).ok()
    worker = spawn("run", "my_jobs:Shout", *FAST, "--log-format", "json")
    line = json.loads(worker.read_errors_until('"shouting"'))
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0
    shown = json.loads(PAGE.blocks("json")[0])
    assert list(line) == list(shown)
    same = ("level", "event", "kind", "fencing_token", "attempt", "words", "logger")
    assert [line[name] for name in same] == [shown[name] for name in same]


def test_a_terminal_shows_the_line_that_the_page_shows(
    cli: Cli, sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str]
) -> None:
    [job_id] = cli("enqueue", "shout", "--payload", PAYLOAD).ok().lines
    terminal = Terminal("run", "my_jobs:Shout", *FAST, cwd=tmp_path, environment=os.environ | cli_environment)
    terminal.read_until("shouting .*\n")
    terminal.type("\x03")
    assert terminal.wait() == 0
    shown = PAGE.blocks("text")[0].splitlines()[0]
    [line] = [line for line in terminal.plain_text.splitlines() if " shouting " in line]
    assert re.sub(r"^\S+", "", line.rpartition("\x1b[K")[2]).replace(job_id[-8:], "a2de76ad") == re.sub(
        r"^\S+", "", shown
    )


def test_the_status_line_holds_the_fields_that_the_page_shows(cli: Cli, spawn: Spawn) -> None:
    worker = spawn("run", "my_jobs:Shout", *FAST, "--log-format", "console", JSWORKER_STATUS_INTERVAL="1")
    cli("enqueue", "shout", "--payload", PAYLOAD).ok()
    line = worker.read_errors_until("worker status")
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0
    shown = PAGE.blocks("text")[1]
    assert re.findall(r"(\w+)=", shown) == re.findall(r"(\w+)=", line)[: shown.count("=")]
    assert line.split()[1:4] == shown.split()[1:4]
