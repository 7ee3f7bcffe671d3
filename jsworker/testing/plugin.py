"""The pytest plugin: fixtures. Every pytest loads it where jsworker is installed, so it imports late."""

import inspect
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jsworker import JobClient, Settings, SyncJobClient
    from jsworker.testing.shared_servers import RunningServers

_FOLDER = "jsworker_servers_folder"
_SHARED_FOLDER = pytest.StashKey[Path]()
_INI = {
    "jsworker_database_url": "URL of a PostgreSQL for jsworker's fixtures, instead of an embedded one",
    "jsworker_nats_url": "URL of a NATS server for jsworker's fixtures, instead of an embedded one",
}
_ASYNC_CLIENT = "_jsworker_async_client"
_TESTS_LOOP = "asyncio_default_test_loop_scope"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini options."""
    for name, text in _INI.items():
        parser.addini(name, text, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the client's fixtures of pytest-asyncio, whose strict mode accepts only its own fixtures."""
    if config.pluginmanager.hasplugin("asyncio") and _knows_loop_scopes(config):
        from jsworker.testing import asyncio_client  # noqa: PLC0415 -- pytest-asyncio may be missing

        config.pluginmanager.register(asyncio_client, "jsworker-asyncio")


def _knows_loop_scopes(config: pytest.Config) -> bool:
    try:
        config.getini(_TESTS_LOOP)
    except ValueError:
        return False
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of pytest-xdist the folder of the servers' data, because they share the servers."""
    stash = node.config.stash
    if _SHARED_FOLDER not in stash:
        from jsworker.testing.servers_folder import new_folder  # noqa: PLC0415 -- as above

        stash[_SHARED_FOLDER] = new_folder()
    node.workerinput[_FOLDER] = str(stash[_SHARED_FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete the data that the processes of pytest-xdist have shared."""
    folder = config.stash.get(_SHARED_FOLDER, None)
    if folder is not None:
        import shutil  # noqa: PLC0415 -- as above

        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let test cases of ``unittest`` use the servers and the template of the session."""
    module = sys.modules.get("jsworker.testing.unittest_case")
    if module is None:
        return
    for item in items:
        if isinstance(item, pytest.Function) and issubclass(item.cls or object, module.JsworkerTestCase):
            item.fixturenames.insert(0, "jsworker_template")


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: "pytest.FixtureDef[Any]") -> Generator[None, Any, None]:
    """Let the functions of ``jsworker.testing`` use the settings that an overriding fixture has made."""
    outcome = yield
    if fixturedef.argname == "jsworker_settings" and outcome.excinfo is None:
        from jsworker.testing.shared_servers import using  # noqa: PLC0415 -- as above

        opened = ExitStack()
        opened.enter_context(using(outcome.get_result()))
        fixturedef.addfinalizer(opened.close)


@pytest.fixture(scope="session")
def jsworker_servers(request: pytest.FixtureRequest) -> "Iterator[RunningServers]":
    """A PostgreSQL and a nats-server for the whole session, shared by the processes of pytest-xdist.

    Embedded ones (extra ``embedded``), or those of the ini options ``jsworker_database_url`` and
    ``jsworker_nats_url`` or the variables ``JSWORKER_TEST_DATABASE_URL`` and ``JSWORKER_TEST_NATS_URL``.
    """
    from jsworker import JsworkerError  # noqa: PLC0415
    from jsworker.testing.shared_servers import running_servers  # noqa: PLC0415

    config = request.config
    shared = getattr(config, "workerinput", {}).get(_FOLDER)
    given = {name.removeprefix("jsworker_"): config.getini(name) for name in _INI}
    with ExitStack() as opened:
        try:
            servers = opened.enter_context(running_servers(None if shared is None else Path(shared), **given))
            servers.template_url  # noqa: B018 -- migrates the template now, so that no test waits for it
        except JsworkerError as error:
            pytest.fail(f"jsworker_servers: {error}", pytrace=False)
        yield servers


@pytest.fixture(scope="session")
def jsworker_template(jsworker_servers: "RunningServers") -> str:
    """The URL of the database of which each test gets a copy; override it to make your own tables there."""
    return jsworker_servers.template_url


@pytest.fixture
def jsworker_settings(
    jsworker_servers: "RunningServers",
    jsworker_template: str,  # noqa: ARG001 -- an overriding fixture fills the template before it is copied
) -> "Iterator[Settings]":
    """Settings of the test's own database and stream; the environment holds them too during the test."""
    from jsworker import JsworkerError  # noqa: PLC0415

    with ExitStack() as opened:
        try:
            settings = opened.enter_context(jsworker_servers.test_settings())
        except JsworkerError as error:
            pytest.fail(f"jsworker_settings: {error}", pytrace=False)
        yield settings


@pytest.fixture
def job_client(request: pytest.FixtureRequest) -> "JobClient":
    """An open ``JobClient`` on the test's database, for async tests of pytest-asyncio or anyio."""
    if "anyio_backend" in request.fixturenames:
        name = _ASYNC_CLIENT
        if (backend := request.getfixturevalue("anyio_backend_name")) != "asyncio":
            pytest.fail(f"job_client needs anyio's backend asyncio, not {backend}", pytrace=False)
    elif request.config.pluginmanager.hasplugin("asyncio") and inspect.iscoroutinefunction(request.function):
        if not _knows_loop_scopes(request.config):
            pytest.fail("job_client needs pytest-asyncio 0.26 or later", pytrace=False)
        from jsworker.testing.asyncio_client import client_of_test  # noqa: PLC0415 -- as above

        name = client_of_test(request.node)
    else:
        needs = "an async test that pytest-asyncio or anyio runs; others take sync_job_client"
        pytest.fail(f"job_client needs {needs}", pytrace=False)
    client: JobClient = request.getfixturevalue(name)
    return client


@pytest.fixture
def sync_job_client(jsworker_settings: "Settings") -> "Iterator[SyncJobClient]":
    """An open ``SyncJobClient`` on the test's database, for tests without ``await``."""
    from jsworker import SyncJobClient  # noqa: PLC0415

    with SyncJobClient(jsworker_settings) as client:
        yield client


@pytest.fixture(name=_ASYNC_CLIENT)
async def _async_client(jsworker_settings: "Settings") -> "AsyncIterator[JobClient]":
    from jsworker import JobClient  # noqa: PLC0415

    async with JobClient(jsworker_settings) as client:
        yield client
