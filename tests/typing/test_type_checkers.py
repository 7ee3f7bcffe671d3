"""mypy --strict and pyright let right uses of the public names pass, and refuse each wrong one."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = "tests/typing/right_uses.py", "tests/typing/wrong_uses.py"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def refused_by_mypy() -> set[tuple[str, int]]:
    told = run("mypy", "--strict", "--hide-error-context", "--no-error-summary", RIGHT, WRONG)
    found = re.findall(r"^(\S+?):(\d+): error: ", told, re.MULTILINE)
    return {(name, int(line)) for name, line in found}


def refused_by_pyright() -> set[tuple[str, int]]:
    told = json.loads(
        run("pyright", "--project", "tests/typing", "--pythonpath", sys.executable, "--outputjson")
    )
    assert told["summary"]["filesAnalyzed"] == 2
    found = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    places = [
        (str(Path(each["file"]).relative_to(ROOT)), each["range"]["start"]["line"] + 1) for each in found
    ]
    return set(places)


def marked_lines() -> set[tuple[str, int]]:
    lines = (ROOT / WRONG).read_text().splitlines()
    return {(WRONG, number) for number, line in enumerate(lines, 1) if line.endswith("# error")}


@pytest.mark.parametrize("refused", [refused_by_mypy, refused_by_pyright])
def test_each_wrong_line_is_refused_and_no_other(refused: Callable[[], set[tuple[str, int]]]) -> None:
    found, marked = refused(), marked_lines()
    assert len(marked) > 40
    assert (found - marked, marked - found) == (set(), set())
