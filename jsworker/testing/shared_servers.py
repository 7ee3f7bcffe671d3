"""The servers of tests: all tests share them, and each test has a database and a stream of its own."""

import asyncio
import atexit
import os
import shutil
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from jsworker.core.errors import JsworkerError, ServersUnavailable, SettingsError
from jsworker.core.events import Events
from jsworker.core.settings import Settings, load_settings, variable_of
from jsworker.core.settings.variables import PREFIX, TEST_SERVERS
from jsworker.embedded import EmbeddedServers
from jsworker.ownership.database import Database
from jsworker.ownership.throwaway import ThrowawayDatabases
from jsworker.stream.api import JetStreamApi, NotThere
from jsworker.stream.connection import Connection
from jsworker.testing.runner_settings import of_runner
from jsworker.testing.servers_folder import new_folder

T = TypeVar("T")

# Nothing waits for the disk, and no table lives long enough to need a vacuum. COMMIT keeps its meaning, and a
# killed server still finds every commit again; only a crash of the machine would lose commits.
_POSTGRES_SETTINGS: Final = MappingProxyType(
    {
        "fsync": "off",
        "full_page_writes": "off",
        "dynamic_shared_memory_type": "mmap",
        "autovacuum_naptime": "1d",
    }
)
_PACE: Final = MappingProxyType({"relay_interval": 0.1, "scan_interval": 0.5, "shutdown_timeout": 5.0})
"""Shorter times than the defaults. The thresholds for silent owners stay: test machines are busy."""

_ANSWER_SECONDS: Final = 10.0


class RunningServers:
    """A PostgreSQL and a nats-server that run, and give each test a database and a stream of its own.

    Used by one thread. ``template_url`` is the migrated database that each test gets a copy of: tables that
    you make in it at the start are in every test's database.
    """

    def __init__(self, database_url: str, nats_url: str, *, are_given: bool) -> None:
        self.database_url = database_url
        self.nats_url = nats_url
        self._are_given = are_given
        self._databases = ThrowawayDatabases(database_url)
        self._template: str | None = None

    @property
    def template_url(self) -> str:
        """The URL of the database that is copied; close your connections to it before the first test."""
        return self._databases.url_of(self._template_name())

    @contextmanager
    def test_settings(self) -> Iterator[Settings]:
        """Make a database and a stream for one test, and yield settings that name them.

        Until the end of the block the environment holds these settings and no other ``JSWORKER_`` variable,
        except those that name test servers, and the functions of ``jsworker.testing`` use them.

        Raises:
            DatabaseUnavailable, DatabaseRefused: the database cannot be made.
            TransitionRefused: another session is connected to the template.
        """
        name = self._databases.copy(self._template_name())
        unique = name.rpartition("_")[2]
        own: dict[str, Any] = {
            "database_url": self._databases.url_of(name),
            "nats_url": self.nats_url,
            "stream": f"TEST_{unique}",
            "subject_prefix": f"test-{unique}",
            **_PACE,
        }
        try:
            with _environment(own), using(load_settings()) as settings:
                yield settings
        finally:
            self._databases.drop(name)
            if self._are_given:  # embedded servers are deleted with all their streams
                with suppress(JsworkerError):
                    delete_stream(settings_at(self, own["stream"]))

    def close(self) -> None:
        """Drop the databases that this object has made."""
        self._databases.close()

    def _template_name(self) -> str:
        if self._template is None:
            self._template = self._databases.make_template()
        return self._template


def settings_at(servers: RunningServers, stream: str = "TEST") -> Settings:
    """Return settings on the servers themselves, whatever the environment says."""
    with _environment({"database_url": servers.database_url, "nats_url": servers.nats_url, "stream": stream}):
        return load_settings()


@contextmanager
def running_servers(
    folder: Path | None = None, *, database_url: str | None = None, nats_url: str | None = None
) -> Iterator[RunningServers]:
    """Start embedded servers for the length of the block, or use given servers.

    Servers are given by the arguments, else by ``JSWORKER_TEST_DATABASE_URL`` and ``JSWORKER_TEST_NATS_URL``.
    On given servers databases named ``jsworker_test_…`` and streams named ``TEST_…`` are made and dropped,
    one migrated template is kept, and nothing else is touched.

    Args:
        folder: where the data of embedded servers are; processes that name the same folder share the servers.
            None: a new folder, in memory if there is room.
        database_url: of any database of a PostgreSQL, with a login that may create databases.
        nats_url: of a NATS server with JetStream.

    Raises:
        ServersUnavailable: the packages of the extra ``embedded`` are missing, or a server does not start.
        SettingsError: only one of the two URLs is given, or one is not valid.
        DatabaseUnavailable, DatabaseRefused, StreamUnavailable, StreamRefused: a given server cannot be used.
    """
    database_url = database_url or os.environ.get(TEST_SERVERS["database_url"])
    nats_url = nats_url or os.environ.get(TEST_SERVERS["nats_url"])
    with ExitStack() as opened:
        if database_url or nats_url:
            servers = _given_servers(database_url, nats_url)
            opened.callback(servers.close)
            _wait_for(_connect(settings_at(servers)))
        else:
            servers = opened.enter_context(_embedded_servers(folder))
        opened.enter_context(_noted(_running, servers))
        yield servers


def servers_of_process() -> RunningServers:
    """Return the servers of an open block of this process, else new servers that end with the process."""
    if not _running:
        opened = ExitStack()
        opened.enter_context(running_servers())
        atexit.register(opened.close)
    return _running[-1]


def _given_servers(database_url: str | None, nats_url: str | None) -> RunningServers:
    if database_url is None or nats_url is None:
        is_there, missing = ("database_url", "nats_url") if database_url else ("nats_url", "database_url")
        raise SettingsError(
            f"{TEST_SERVERS[is_there]} must come with {TEST_SERVERS[missing]}: name both servers, or neither"
        )
    raw = RunningServers(database_url, nats_url, are_given=True)
    try:
        return RunningServers(settings_at(raw).database_dsn(), nats_url, are_given=True)
    except SettingsError as error:
        text = str(error)
        for name, variable in TEST_SERVERS.items():
            text = text.replace(f"{variable_of(name)}=", f"{variable}=")
        raise SettingsError(text) from None


@contextmanager
def _embedded_servers(folder: Path | None) -> Iterator[RunningServers]:
    own = folder is None
    folder = folder or new_folder()
    folder.mkdir(
        mode=0o711, parents=True, exist_ok=True
    )  # a PostgreSQL that root starts runs as another user
    try:
        with EmbeddedServers(folder, postgres_settings=_POSTGRES_SETTINGS) as embedded:
            servers = RunningServers(embedded.database_url, embedded.nats_url, are_given=False)
            try:
                yield servers
            finally:
                servers.close()
    except ServersUnavailable as error:
        if "pip install" not in str(error):
            raise
        named = " and ".join(TEST_SERVERS.values())
        raise ServersUnavailable(f"{error}, or name servers that run by {named}") from None
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)


# --- The servers and settings that the functions of jsworker.testing use. ---

_running: list[RunningServers] = []
_used: list[Settings] = []


def using(settings: Settings) -> AbstractContextManager[Settings]:
    """Let the functions of ``jsworker.testing`` use these settings within the block."""
    return _noted(_used, settings)


def settings_in_use(settings: Settings | None, what: str) -> Settings:
    """Return the given settings, or those of the running test; ``what`` names the caller in an error."""
    if settings is not None:
        return settings
    if (found := _settings_of_test()) is None:
        raise RuntimeError(
            f"{what} needs a database: let the test ask for the fixture job_client or jsworker_settings, "
            "derive it from JsworkerTestCase, or give settings="
        )
    return found


def settings_without_servers() -> Settings:
    """Return settings for code that needs no server: those of the running test, else the defaults."""
    if found := _settings_of_test():
        return found
    with _environment({"database_url": "postgresql://127.0.0.1/no_database"}):
        return load_settings()


def _settings_of_test() -> Settings | None:
    """Return the settings of the innermost block, else those of a framework's test runner, if it has some."""
    if _used:
        return _used[-1]
    return of_runner[0]() if of_runner else None


def database_at(settings: Settings) -> Database:
    """Return the database of settings, with a long statement time-out: test machines are busy."""
    return Database(settings.database_dsn(), statement_timeout=_ANSWER_SECONDS)


@contextmanager
def _noted(noted: list[T], value: T) -> Iterator[T]:
    noted.append(value)
    try:
        yield value
    finally:
        noted.remove(value)


@contextmanager
def _environment(own: Mapping[str, Any]) -> Iterator[None]:
    """Let the environment hold only these settings within the block, apart from those of test servers."""
    before = {name: value for name, value in os.environ.items() if _is_setting(name)}
    try:
        for name in before:
            del os.environ[name]
        os.environ.update({variable_of(name): str(value) for name, value in own.items()})
        yield
    finally:
        for name in list(filter(_is_setting, os.environ)):
            del os.environ[name]
        os.environ.update(before)


async def _connect(settings: Settings, *, deletes_stream: bool = False) -> None:
    """Return once NATS accepts a connection; raises as ``Stream.connect`` does."""
    api = JetStreamApi(Connection(settings, events=Events(), name="jsworker testing"), settings)
    await api.connect(_ANSWER_SECONDS)
    try:
        if deletes_stream:
            with suppress(NotThere):
                deleting = api.manager.delete_stream(settings.stream)
                await api.ask(f"STREAM.DELETE.{settings.stream}", deleting)
    finally:
        await api.close()


def delete_stream(settings: Settings) -> None:
    """Delete the stream of settings, if it is there; raises as ``Stream.connect`` does."""
    _wait_for(_connect(settings, deletes_stream=True))


def _wait_for(call: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread of its own: the event loop of this thread belongs to the tests."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, call).result()


def _is_setting(name: str) -> bool:
    return name.startswith(PREFIX) and name not in TEST_SERVERS.values()
