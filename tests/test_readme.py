"""The README's code and commands, run as a newcomer would run them."""

import ast
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
from jsworker.cli.app import _COMMANDS
from jsworker.core import errors
from jsworker.core.settings import Settings, variable_of

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def first_commands() -> list[list[str]]:
    install, commands = blocks("sh")[:2]
    assert install == 'pip install ".[embedded]"\n'  # test_wheel.py does it
    return [shlex.split(line) for line in commands.splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], subprocess.Popen[str]]:
    """Start a command in an empty folder that holds only the README's first block, with an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "words.py").write_text(blocks("python")[0])
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
    enqueue, work, jobs = first_commands()
    ids = finished(run(enqueue)).split()
    assert len(ids) == 3

    worker = run(work)
    try:
        deadline = time.monotonic() + 60
        while finished(run([*jobs, "--json"])).count('"completed"') < 3:
            assert time.monotonic() < deadline
    finally:
        worker.send_signal(signal.SIGINT)
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    listing = finished(run(jobs))
    assert all(job_id in listing for job_id in ids)


@pytest.mark.parametrize("code", blocks("python"))
def test_every_block_is_python_on_names_that_exist(code: str) -> None:
    tree = ast.parse(f"async def block():\n{_indented(code)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jsworker":
            exec(compile(ast.Module([node], []), "README", "exec"), {})  # noqa: S102 -- our own README


def test_every_variable_that_it_names_is_a_setting() -> None:
    known = {variable_of(name) for name in Settings.model_fields}
    named = set(re.findall(r"JSWORKER_[A-Z_]+[A-Z]", README.read_text()))
    assert named
    assert {name.removesuffix("_FILE") if name not in known else name for name in named} <= known


def test_the_error_that_it_shows_is_the_one_that_is_printed(
    run: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    [line] = [block.strip() for block in blocks("") if "must exceed" in block]
    options = ["--database-url", "postgresql://nobody@127.0.0.1:1/none", "--ack-wait", "200"]
    process = run(["jsworker", "run", "words:CountWords", *options])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert line in err


def test_it_names_every_command_and_every_page() -> None:
    text = README.read_text()
    assert [name for name in _COMMANDS if f"jsworker {name}" not in text] == []
    pages = sorted(page.name for page in (README.parent / "docs").glob("*.md"))
    assert [name for name in pages if f"(docs/{name})" not in text] == []


@pytest.mark.parametrize(
    "page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_errors_that_a_page_names_can_be_imported_from_jsworker(page: Path) -> None:
    raised = {name for name, found in vars(errors).items() if isinstance(found, type)} - {"timedelta", "UUID"}
    named = set(re.findall(r"`(?:jsworker\.)?(\w+)`", page.read_text())) & raised
    assert [name for name in named if name not in jsworker.__all__] == []


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())
