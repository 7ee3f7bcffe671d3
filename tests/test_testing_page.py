"""docs/testing.md: its files are a project whose tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jsworker.testing
from jsworker.testing import sync
from tests.support.documents import Page
from tests.support.servers import TestServers

PAGE = Page("docs/testing.md")
FILE = re.compile(r"(?ms)^```python\n# (\w+\.py)\n(.*?)^```$")


def test_its_files_are_tests_that_pass(tmp_path: Path, servers: TestServers) -> None:
    files = dict(FILE.findall(PAGE.text))
    assert len(files) == PAGE.text.count("```python")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nasyncio_default_fixture_loop_scope = function\n"
    )
    given = {"JSWORKER_TEST_DATABASE_URL": servers.postgres.url, "JSWORKER_TEST_NATS_URL": servers.nats.url}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | given,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "9 passed" in result.stdout


def test_it_names_everything_that_there_is() -> None:
    public = {*jsworker.testing.__all__, *sync.__all__}
    of_types = {"JobRun", "KilledJob", "RunError", "RunningServers", "WorkDone"}
    assert {name for name in public - of_types if name not in PAGE.text} == set()
