"""docs/testing.md: its files are a project whose tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

import jsworker.testing
from jsworker.testing import sync
from jsworker.testing.shared_servers import RunningServers
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


def test_its_query_lists_databases_that_nobody_is_connected_to(servers: TestServers) -> None:
    [query] = re.findall(r"`(SELECT [^`]*)`", PAGE.text)
    given = RunningServers(servers.postgres.url, servers.nats.url, are_given=True)
    with (
        given.test_settings() as settings,
        psycopg.connect(servers.postgres.url, autocommit=True) as connection,
    ):

        def listed() -> set[str]:
            return {name for (name,) in connection.execute(query)}

        name = settings.database_dsn().rpartition("/")[2]
        assert name in listed()
        with psycopg.connect(settings.database_dsn()):
            assert name not in listed()
        assert all(each.startswith("jsworker_test_") for each in listed())
    given.close()
