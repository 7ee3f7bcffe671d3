"""The settings: from ``JSWORKER`` in Django's settings, the environment, and DATABASES."""

import os
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections

from jsworker.core.errors import SettingsError
from jsworker.core.names import shown
from jsworker.core.settings import Settings, changed_environment, load_settings
from jsworker.core.settings.variables import PREFIX, database_parts, likely

_OWN_NAMES: Final = frozenset({"DATABASE", "TARGETS"})
_PASSED_ON: Final = (
    *("service", "servicefile", "hostaddr", "target_session_attrs", "load_balance_hosts"),
    *("passfile", "require_auth", "channel_binding", "requirepeer", "gssencmode", "krbsrvname"),
    *("sslmode", "sslnegotiation", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcertmode"),
    *("sslcrl", "sslcrldir", "sslsni", "ssl_min_protocol_version", "ssl_max_protocol_version"),
)
"""Options of libpq in DATABASES that determine which server is connected to, and how securely."""
_REFUSED: Final = ("dbname", "host", "port", "user", "password")
"""Options that name another database or login than the entry of DATABASES itself."""
MIDDLEWARE: Final = "jsworker.contrib.django.middleware:fresh_connections"
_RUN: Final = secrets.token_hex(4)
"""Part of streams' names in tests: a stream that a killed test run has left belongs to another database."""
names_at_start: Final[dict[str, Any]] = {}
"""The names of the databases in DATABASES when Django started: what runs tests replaces them there."""


def given() -> dict[str, Any]:
    """Return ``JSWORKER`` of Django's settings; ImproperlyConfigured: it has an unknown name, or is no dict.

    Names are those of the environment variables without JSWORKER_, and two more: ``DATABASE``, an alias of
    DATABASES, and ``TARGETS``, what ``manage.py jsworker_run`` runs.
    """
    found = getattr(django_settings, "JSWORKER", {})
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured(f"JSWORKER must be a dictionary, not {type(found).__name__}")
    known = {name.upper() for name in Settings.model_fields} | _OWN_NAMES
    if unknown := [str(name) for name in found if name not in known]:
        close = likely(unknown[0], known)
        advice = f": did you mean {close!r}?" if close else ""
        raise ImproperlyConfigured(f"JSWORKER[{shown(unknown[0])}] is no setting of jsworker{advice}")
    return dict(found)


def database_alias() -> str:
    """Return the alias of the jobs' database; ImproperlyConfigured: DATABASES has no such alias."""
    alias = given().get("DATABASE", DEFAULT_DB_ALIAS)
    if alias not in list(connections):
        entries = ", ".join(map(repr, connections))
        raise ImproperlyConfigured(
            f"JSWORKER['DATABASE']={shown(alias)} must be an entry of DATABASES: {entries}"
        )
    return str(alias)


def jsworker_settings() -> Settings:
    """Return the settings: of ``JSWORKER``, else of the environment; if neither has a database, of DATABASES.

    While Django's tests run, Django's test database takes the place of the configured one. Only workers use
    NATS then, with a stream of the tests' own.

    Raises ImproperlyConfigured, with a line for each fault.
    """
    alias = database_alias()
    try:
        settings = load_settings(**_values(alias))
    except SettingsError as error:
        raise ImproperlyConfigured(str(error)) from None
    return _in_tests(settings, alias)


def sources() -> frozenset[tuple[str, str]]:
    """Return what the settings are made of, without the contents of files, which may change at any time."""
    alias = database_alias()
    variables = changed_environment(os.environ, _values(alias))
    own = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    return frozenset({**own, "NAME": str(connections[alias].settings_dict.get("NAME"))}.items())


def _values(alias: str) -> dict[str, Any]:
    values = {name.lower(): value for name, value in given().items() if name not in _OWN_NAMES}
    is_set = any(os.environ.get(name) for name in ("JSWORKER_DATABASE_URL", "JSWORKER_DATABASE_URL_FILE"))
    if not values.get("database_url", is_set):
        values["database_url"] = url_of(connections[alias].settings_dict)
    return values


def _is_of_tests(alias: str, replaced: str | None = None) -> bool:
    """Return whether Django's test runner has replaced a database by one for its tests.

    ``replaced`` is another name of the database that was replaced.
    """
    database = connections[alias].settings_dict
    own, at_start = str(database.get("NAME") or ""), names_at_start.get(alias)
    tested = (database.get("TEST") or {}).get("NAME") or f"test_{replaced or at_start}"
    # Parallel tests append _1, _2 …; what else pytest-django appends, it also writes into TEST.
    return own != at_start and re.fullmatch(rf"{re.escape(str(tested))}(_\d+)?", own) is not None


def settings_of_tests() -> Settings | None:
    """Return the settings if jobs are in the database that Django's test runner has made, else None.

    A URL may name another database than the one that the runner has replaced.
    """
    alias = database_alias()
    if not _is_of_tests(alias):
        return None
    settings = jsworker_settings()
    return settings if _name_in(settings) == str(connections[alias].settings_dict.get("NAME")) else None


def _in_tests(settings: Settings, alias: str) -> Settings:
    name, own = _name_in(settings), str(connections[alias].settings_dict.get("NAME") or "")
    # The URL of DATABASES has the test database's name already.
    if not name or not _is_of_tests(alias, None if name == own else name):
        return settings
    head, mark, query = settings.database_url.partition("?")
    url = f"{head.rpartition('/')[0]}/{quote(own, safe='')}{mark}{query}"
    unique = f"{_RUN}_{re.sub('[^a-z0-9_-]', '_', own.lower())}"
    # The configured stream belongs to the other database, on which child processes would set Django up.
    replaced = {
        "database_url": url,
        "stream": f"TEST_{unique}",
        "subject_prefix": f"test-{unique}",
        "preload": "",
        "middleware": preceded_by(MIDDLEWARE, settings.middleware),
    }
    in_tests = settings.model_copy(update=replaced)
    in_tests.model_fields_set.discard("nats_url")  # nothing is published but by workers that tests start
    return in_tests


def preceded_by(first: str, names: str) -> str:
    """Return a comma list that begins with ``first``, and has it once."""
    others = [each.strip() for each in names.split(",") if each.strip()]
    return ",".join([first, *(each for each in others if each != first)])


def _name_in(settings: Settings) -> str:
    path = database_parts(settings.database_url)["place"].partition("?")[0]
    return unquote(path.partition("/")[2])


def environment() -> dict[str, str]:
    """Return this process's environment with the settings of Django in it; it contains secrets."""
    values, settings = _values(database_alias()), jsworker_settings()
    if settings.database_password is None:
        values["database_url"] = settings.database_dsn()
    else:
        values["database_url"] = settings.database_url
        values["database_password"] = settings.database_password
    if not settings.nats_is_set:
        values["nats_url"] = None
        values["stream"], values["subject_prefix"] = settings.stream, settings.subject_prefix
    return changed_environment(os.environ, values)


def url_of(database: Mapping[str, Any]) -> str:
    """Return the URL of an entry of DATABASES.

    Raises ImproperlyConfigured if it is not PostgreSQL, or cannot be written as a URL.
    """
    engine = str(database.get("ENGINE", ""))
    if "postg" not in engine.rpartition(".")[2]:
        raise ImproperlyConfigured(
            f"jobs need PostgreSQL, and DATABASES[{database_alias()!r}] is of {engine}"
        )
    user, password, host, name = (
        str(database.get(part) or "") for part in ("USER", "PASSWORD", "HOST", "NAME")
    )
    options = database.get("OPTIONS") or {}
    query = {option: str(options[option]) for option in _PASSED_ON if option in options}
    if refused := [option for option in _REFUSED if option in options]:
        raise ImproperlyConfigured(
            f"workers do not read {refused[0]!r} in OPTIONS of DATABASES[{database_alias()!r}]:"
            " set JSWORKER['DATABASE_URL'] to the same database"
        )
    port = str(database.get("PORT") or "")
    if "," in host and port and "," not in port:  # one port of all hosts
        port = ",".join([port] * len(host.split(",")))
    if host.startswith(("/", "@")) or "," in host:  # a socket, or several servers
        query["host"], host = host, ""
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    place = f"[{host}]" if ":" in host else host
    if port and place:
        place += f":{port}"
    elif port:
        query["port"] = port
    tail = f"?{urlencode(query)}" if query else ""
    return f"postgresql://{login}{'@' if login else ''}{place}/{quote(name, safe='')}{tail}"


def check_configuration(**_: Any) -> list[CheckMessage]:
    """Check the settings, for ``manage.py check``."""
    try:
        settings = jsworker_settings()
    except ImproperlyConfigured as error:
        return [Error(line, id="jsworker.E001") for line in str(error).splitlines()]
    return _check_database(settings)


def _check_database(settings: Settings) -> list[CheckMessage]:
    """Compare only the names: a URL with another login or host (past a pooler) may be the same database."""
    alias = database_alias()
    django_name = str(connections[alias].settings_dict.get("NAME") or "")
    name = _name_in(settings)
    if not name or not django_name or name == django_name:
        return []
    source = "JSWORKER['DATABASE_URL']" if "DATABASE_URL" in given() else "JSWORKER_DATABASE_URL"
    return [
        CheckWarning(
            f"{source} names the database {shown(name)}, DATABASES[{alias!r}] {shown(django_name)}:"
            " workers do not find what enqueue() inserts",
            hint="If a pooler knows one database by both names, silence jsworker.W001.",
            id="jsworker.W001",
        )
    ]


def task_backends() -> list[str]:
    """Return the aliases of TASKS whose backend is ``JsworkerBackend``."""
    tasks = getattr(django_settings, "TASKS", {})
    own = "jsworker.contrib.django.tasks.JsworkerBackend"
    return [alias for alias, backend in tasks.items() if backend.get("BACKEND") == own]
