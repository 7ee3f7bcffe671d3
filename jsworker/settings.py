"""Settings: the environment variables ``JSWORKER_…``, their rules, and one clear line for each fault."""

import difflib
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote_to_bytes

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from jsworker.errors import SettingsError
from jsworker.names import printable, shown

_PREFIX = "JSWORKER_"
_FROM_FILES = ("database_url", "database_password", "nats_url", "nats_user", "nats_password", "nats_token")
_HIDDEN = frozenset(_FROM_FILES) - {"nats_user"}
_LONGEST = 1_000_000_000
"""Seconds (31 years) that every clock, interval and count of nanoseconds can hold."""

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^:/?#@,\s\[\]]{%s})(?::\d{1,5})?"
_DATABASE_URL = re.compile(
    r"(?P<scheme>postgresql|postgresql\+psycopg|postgres)://"
    r"(?:(?P<user>[^:/?#@\s]*)(?::(?P<password>[^/?#@\s]*))?@)?"
    rf"(?P<place>{_HOST % '0,'}(?:/[^?#@\s]*)?(?:\?[^#@\s]*)?)"
)
_NATS_SERVER = re.compile(rf"(?:nats|tls)://(?:[^/?#@\s]*@)?{_HOST % '1,'}/?")
_SECRET_IN_QUERY = re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)
_SERVICE_LINK = re.compile(r"\w+_(?:SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(?:TCP|UDP|SCTP)\w*)")


def _broken(rule: str) -> PydanticCustomError:
    """A rule that the value breaks; the line reads ``NAME=value`` and the rule."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def _refused(line: str) -> PydanticCustomError:
    """A whole line, for values that must not be shown as they are."""
    return PydanticCustomError("line", "{line}", {"line": line})


def _between(lowest: int, highest: int) -> AfterValidator:
    def check(value: int) -> int:
        if not lowest <= value <= highest:
            raise _broken(f"must be from {lowest} to {highest}")
        return value

    return AfterValidator(check)


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise _broken(rule)
        return value

    return AfterValidator(check)


def _duration(value: float) -> float:
    if not 0 < value <= _LONGEST:
        raise _broken(f"must be greater than 0 and at most {_LONGEST}")
    return value


def _readable(path: Path) -> Path:
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise _broken(f"cannot be read: {error.strerror}") from None


def _own_prefix(prefix: str) -> str:
    if f"{prefix}.".startswith("jsworker.worker."):
        raise _broken("must not begin with jsworker.worker, where workers answer whether they live")
    return prefix


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _none(value: Any) -> Any:
    return None if _lower(value) in ("", "none") else value


def _unset(value: Any) -> Any:
    return None if value == "" else value


def _no_service_link(value: Any) -> Any:
    # Kubernetes sets JSWORKER_HTTP_PORT=tcp://... in every pod beside a Service named jsworker-http.
    return None if str(value).startswith("tcp://") else value


Seconds = Annotated[float, AfterValidator(_duration)]
SecondsOrNone = Annotated[Seconds | None, BeforeValidator(_none)]
Count = Annotated[int, _between(1, 1_000_000)]
ReadableFile = Annotated[Annotated[Path, AfterValidator(_readable)] | None, BeforeValidator(_unset)]
_NAME_RULE = (
    "must hold only letters, digits, '-' and '_', in parts joined by single dots, at most 200 characters"
)
HostName = Annotated[str, _matching(r"(?!.{201})[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", _NAME_RULE)]
Word = Annotated[str, _matching("[!-~]{1,200}", "must be 1 to 200 visible ASCII characters")]


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: ``ack_wait`` is ``JSWORKER_ACK_WAIT``."""
    return _PREFIX + name.upper()


class _Environment(PydanticBaseSettingsSource):
    """Variables by their exact names; secrets also from the file that ``…_FILE`` names."""

    def get_field_value(
        self,
        field: FieldInfo,  # noqa: ARG002 -- the base class's signature
        field_name: str,
    ) -> tuple[Any, str, bool]:
        """Return what is set, under which name, and that it is plain text."""
        return _from_environment(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields.items()
        found = {name: self.get_field_value(field, name)[0] for name, field in fields}
        return {name: value for name, value in found.items() if value is not None}


class _FieldFaults(SettingsError):
    """What is wrong with single settings: a line for each, by the setting's name."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        super().__init__("\n".join(lines.values()))
        self.names = frozenset(lines)


class Settings(BaseSettings):
    """What a worker and a client are told from outside; durations are seconds.

    Made by ``load_settings``, which also checks what settings demand of each other. Secrets show in no
    repr, dump or error.

    Raises:
        SettingsError: values are wrong or missing, one line each.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    database_url: str = Field(
        repr=False, exclude=True, description="PostgreSQL: postgresql://user@host:port/database"
    )
    database_password: SecretStr | None = Field(None, description="password, when the URL holds none")
    nats_url: str = Field(
        "nats://127.0.0.1:4222",
        repr=False,
        exclude=True,
        description="NATS servers: nats://host:port, comma-separated",
    )
    nats_user: str | None = Field(None, description="NATS user name")
    nats_password: SecretStr | None = Field(None, description="NATS password")
    nats_token: SecretStr | None = Field(None, description="NATS token")
    nats_creds_file: ReadableFile = Field(None, description="path of a NATS credentials file")
    nats_nkey_seed_file: ReadableFile = Field(None, description="path of a NATS nkey seed file")
    nats_tls_ca: ReadableFile = Field(None, description="path of the CA certificates of the NATS servers")
    nats_tls_cert: ReadableFile = Field(None, description="path of the client's certificate for NATS")
    nats_tls_key: ReadableFile = Field(None, description="path of the client's private key for NATS")
    stream: Annotated[
        str,
        _matching(r"(?:(?![.*>/\\])[!-~]){1,200}", "must hold no spaces, dots, wildcards or slashes"),
    ] = Field("JOBS", description="name of the JetStream stream")
    subject_prefix: Annotated[
        str,
        _matching(
            r"(?!.{201})[a-z0-9_-]+(\.[a-z0-9_-]+)*", "must be dot-separated words of a-z, 0-9, '_' and '-'"
        ),
        AfterValidator(_own_prefix),
    ] = Field("jobs", description="subjects are <prefix>.<kind>")
    stream_replicas: Annotated[int, _between(1, 5)] = Field(1, description="copies of the stream, servers")
    concurrency: Annotated[int, _between(1, 10_000)] = Field(10, description="job slots of each process")
    processes: Annotated[int, _between(1, 1000)] = Field(1, description="worker processes")
    heartbeat_interval: Seconds = Field(5.0, description="seconds between heartbeats")
    crash_threshold: SecondsOrNone = Field(
        15.0, description="seconds of silence after which NATS is asked whether the owner lives; none: never"
    )
    stale_threshold: Seconds = Field(
        300.0, description="seconds of silence after which any worker may take a job back"
    )
    scan_interval: Seconds = Field(5.0, description="seconds between searches for stale and lost jobs")
    relay_interval: Seconds = Field(0.5, description="seconds between publishing what waits and what is due")
    recover_on_start: bool = Field(True, description="take back jobs of earlier lives of this host at start")
    ack_wait: Seconds = Field(
        600.0, description="seconds until JetStream delivers an unanswered message again"
    )
    statement_timeout: Seconds = Field(3.0, description="seconds that one database statement may take")
    watchdog_timeout: Seconds = Field(
        120.0, description="seconds without a tick of its event loop until a process is killed"
    )
    shutdown_timeout: Seconds = Field(25.0, description="seconds that running jobs get to end at shutdown")
    grace_period: SecondsOrNone = Field(
        None, description="the pod's termination grace period in seconds, for a check; none: no check"
    )
    max_attempts: Count = Field(5, description="attempts that may end in an error before a job fails")
    max_stalls: Count = Field(3, description="runs taken back from a silent owner before a job fails")
    job_timeout: SecondsOrNone = Field(None, description="seconds that one run may take; none: no limit")
    progress_timeout: SecondsOrNone = Field(
        None, description="seconds without a sign of life from the job itself; none: no limit"
    )
    max_payload_bytes: Annotated[int, _between(1, 2**28 - 1)] = Field(
        2**20, description="largest payload in bytes"
    )
    retention: SecondsOrNone = Field(
        7 * 86_400.0, description="seconds that ended jobs are kept; none: for ever"
    )
    worker_id: Annotated[HostName | None, BeforeValidator(_unset)] = Field(
        None, description="replaces host name and process id in the worker's id"
    )
    hostname: HostName = Field(
        default_factory=socket.gethostname, description="name of this host or pod, stable across restarts"
    )
    pod_uid: Annotated[Word | None, BeforeValidator(_unset)] = Field(None, description="UID of this pod")
    container: Annotated[Word | None, BeforeValidator(_unset)] = Field(
        None, description="name of this container in its pod"
    )
    http_host: Word = Field("127.0.0.1", description="address on which health and metrics are served")
    http_port: Annotated[
        Annotated[int, _between(0, 65_535)] | None, BeforeValidator(_none), BeforeValidator(_no_service_link)
    ] = Field(None, description="port of health and metrics; 0: any free one; none: not served")
    log_format: Annotated[Literal["json", "console"], BeforeValidator(_lower)] = Field(
        default_factory=lambda: "console" if sys.stderr and sys.stderr.isatty() else "json",
        description="json or console; default: console on a terminal, else json",
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)
    ] = Field("info", description="least level that is logged: debug, info, warning, error or critical")

    def __init__(self, **values: Any) -> None:
        faults: dict[str, str] = {}
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = {str(fault["loc"][0]): _line(fault) for fault in error.errors(include_url=False)}
        if faults:  # raised out here: a ValidationError in the traceback would carry the values
            values.clear()
            raise _FieldFaults(faults)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- replaced: it knows no …_FILE
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- not read
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- not read
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take what is given first, then the environment."""
        return init_settings, _Environment(settings_cls)

    @field_validator(*_FROM_FILES, mode="before")
    @classmethod
    def _check_source(cls, value: Any) -> Any:
        if isinstance(value, PydanticCustomError):  # found while the environment was read
            raise value
        return value

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        _database_parts(url.strip())
        return url.strip()

    @field_validator("nats_url")
    @classmethod
    def _check_nats_url(cls, urls: str) -> str:
        servers = [server.strip() for server in urls.split(",")]
        for server in servers:
            if not _NATS_SERVER.fullmatch(server):
                rule = "must read nats://host:port or tls://host:port, special characters percent-encoded"
                raise _refused(f"{_shown_url('nats_url', server)} {rule}")
        return ",".join(servers)

    def database_dsn(self) -> str:
        """Return the URL to connect with: ``postgresql://``, the password in it, percent-encoded."""
        parts = _database_parts(self.database_url)
        given = self.database_password
        password = given.get_secret_value().encode() if given else unquote_to_bytes(parts["password"])
        user = quote(unquote_to_bytes(parts["user"]), safe="")
        login = f"{user}:{quote(password, safe='')}" if password else user
        return f"postgresql://{login}@{parts['place']}" if login else f"postgresql://{parts['place']}"

    def redacted_database_url(self) -> str:
        """Return the database's URL for people: no password."""
        return redact_url(self.database_dsn())

    def redacted_nats_url(self) -> str:
        """Return the NATS servers for people: no credentials."""
        return ",".join(redact_url(server) for server in self.nats_url.split(","))


def load_settings(**overrides: Any) -> Settings:
    """Return the settings of this process.

    Args:
        **overrides: settings given on the command line, as text or typed; only those given. All others
            come from the environment.

    Raises:
        SettingsError: values are wrong or missing, or do not fit each other; one line for each fault.
    """
    faults: list[str] = []
    unsound: frozenset[str] = frozenset()
    try:
        settings = Settings(**overrides)
    except _FieldFaults as error:
        faults, unsound = error.lines, error.names
        settings = Settings(**_without(unsound, overrides))
    faults += [*_misfits(settings, unsound), *_timing_faults(_durations(settings, unsound))]
    if faults:
        overrides.clear()  # a traceback that prints local variables shows no secrets
        raise SettingsError("\n".join(faults))
    return settings


def check_timing(settings: Settings, thresholds: Mapping[str, float | None]) -> None:
    """Check the rules that hold between durations, also for kinds with a stale threshold of their own.

    Args:
        settings: the settings of this process.
        thresholds: seconds by kind; None for a kind whose jobs never become stale.

    Raises:
        SettingsError: one line for each fault, with the numbers.
    """
    values = _durations(settings)
    faults = list(_timing_faults(values))
    for kind, threshold in thresholds.items():
        if threshold is not None and threshold != settings.stale_threshold:
            faults += _kind_faults(kind, threshold, values)
    if faults:
        raise SettingsError("\n".join(faults))


def unknown_variables() -> list[str]:
    """Return a line of warning for each variable that begins like a setting and is none."""
    known = set(_known_variables())
    return [
        _no_setting(variable)
        for variable, value in sorted(os.environ.items())
        if variable.startswith(_PREFIX) and variable not in known and not _is_service_link(variable, value)
    ]


def redact_url(url: str) -> str:
    """Return a URL without what may be secret, however malformed it is."""
    scheme, found, rest = url.partition("://")
    if not found:
        return "***"
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    if not re.fullmatch(r"[\w.%+~-]*", user) or not (colon or scheme.startswith("postgres")):
        user = "***"  # a NATS user name without a password is a token
    if not at and not re.match(r"(\[[^\]]*\]|[^:/?#]*)(:\d*)?([/?#]|$)", place):
        place = place.partition(":")[0] + ":***"  # user:password of somebody who forgot the host
    secret = f"{user}:***@" if colon and user != "***" else f"{user}@"
    place = _SECRET_IN_QUERY.sub(r"\1***", place)
    return f"{scheme}://{secret}{place}" if at else f"{scheme}://{place}"


_TIMING: tuple[tuple[str, str, tuple[tuple[int, str], ...]], ...] = (
    ("stale_threshold", "must be at least", ((3, "heartbeat_interval"),)),
    ("crash_threshold", "must be at least", ((3, "heartbeat_interval"),)),
    ("stale_threshold", "must exceed", ((1, "crash_threshold"),)),
    ("heartbeat_interval", "must exceed", ((1, "statement_timeout"),)),
    ("ack_wait", "must exceed", ((1, "stale_threshold"), (2, "scan_interval"))),
    ("stale_threshold", "must exceed", ((1, "watchdog_timeout"),)),
    ("stale_threshold", "must be at least", ((2, "scan_interval"),)),
    ("grace_period", "must exceed", ((1, "shutdown_timeout"), (2, "statement_timeout"))),
    ("retention", "must exceed", ((2, "ack_wait"),)),
)


def _durations(settings: Settings, unsound: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the durations that take part in rules and are set."""
    names = {name for left, _, right in _TIMING for name in (left, *(term for _, term in right))}
    found = {name: getattr(settings, name) for name in names - unsound}
    return {name: value for name, value in found.items() if value is not None}


def _timing_faults(values: Mapping[str, float], kind: str | None = None) -> Iterator[str]:
    """Yield a line for each rule broken; a kind's own stale threshold is asked only about its own rules."""
    for left, relation, right in _TIMING:
        names = {left, *(name for _, name in right)}
        if not names <= values.keys() or (kind and "stale_threshold" not in names):
            continue
        value = _exact(values[left])
        bound = sum((factor * _exact(values[name]) for factor, name in right), Decimal())
        if not (value > bound or (value == bound and relation == "must be at least")):
            terms = [
                (f"{factor} × " if factor > 1 else "") + _term(name, values, kind) for factor, name in right
            ]
            yield f"{_term(left, values, kind)} {relation} {' + '.join(terms)}"


def _kind_faults(kind: str, threshold: Any, values: Mapping[str, float]) -> Iterator[str]:
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if number and 0 < threshold <= _LONGEST:
        yield from _timing_faults({**values, "stale_threshold": threshold}, kind)
    else:
        rule = f"must be a number of seconds greater than 0 and at most {_LONGEST}"
        yield f"stale_threshold={_as_given(threshold)} of kind {kind} {rule}"


def _term(name: str, values: Mapping[str, float], kind: str | None) -> str:
    if kind and name == "stale_threshold":
        return f"stale_threshold={_number(values[name])} of kind {kind}"
    return f"{variable_of(name)}={_number(values[name])}"


def _exact(value: float) -> Decimal:
    """Return the number that was written: as floats 3 × 0.1 exceeds 0.3."""
    return Decimal(repr(value))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _misfits(settings: Settings, unsound: frozenset[str]) -> Iterator[str]:
    """Yield a line for settings that only make sense together, or only apart."""
    for names in (("nats_user", "nats_password"), ("nats_tls_cert", "nats_tls_key")):
        given = [name for name in names if getattr(settings, name) is not None]
        if len(given) == 1 and unsound.isdisjoint(names):
            missing = next(name for name in names if name not in given)
            yield f"{variable_of(given[0])} must come with {variable_of(missing)}"
    logins = ("nats_user", "nats_token", "nats_creds_file", "nats_nkey_seed_file")
    given = [variable_of(name) for name in logins if getattr(settings, name) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)} must not be set together: keep one login"
    if settings.database_password and _database_parts(settings.database_url)["password"]:
        variables = "JSWORKER_DATABASE_PASSWORD and a password in JSWORKER_DATABASE_URL"
        yield f"{variables} must not be set together: keep one"


def _database_parts(url: str) -> dict[str, str]:
    """Return scheme, user, password (both still percent-encoded) and place of a database's URL."""
    if match := _DATABASE_URL.fullmatch(url):
        return match.groupdict(default="")
    if url.startswith(("postgresql://", "postgresql+psycopg://", "postgres://")):
        rule = "must read postgresql://user:password@host:port/database, special characters percent-encoded"
    else:
        rule = "must begin with postgresql://, postgresql+psycopg:// or postgres://"
    raise _refused(f"{_shown_url('database_url', url)} {rule}")


def _shown_url(name: str, url: str) -> str:
    return f"{variable_of(name)}={shown(redact_url(url))}" if "://" in url else variable_of(name)


def _from_environment(name: str) -> Any:
    """Return a variable's text, None when it is not set, or the fault that was found on the way."""
    variable = variable_of(name)
    value = os.environ.get(variable)
    if name not in _FROM_FILES:
        return value
    path = os.environ.get(f"{variable}_FILE")
    if path and value:
        return _refused(f"{variable} and {variable}_FILE must not be set together: keep one")
    return _content(f"{variable}_FILE", path) if path else value or None


def _content(variable: str, path: str) -> Any:
    """Return a file's text without the newline at its end, or the fault."""
    try:
        text = Path(path).read_text("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        return _refused(f"{variable}={shown(path)} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return _refused(f"{variable}={shown(path)} must be a text file in UTF-8")
    return text or _refused(f"{variable}={shown(path)} must not be an empty file")


def _without(unsound: frozenset[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides that leave out the faulty settings, so that the others can be checked all the same."""
    sound = {name: value for name, value in overrides.items() if name not in unsound}
    for name in unsound & Settings.model_fields.keys():
        field = Settings.model_fields[name]
        sound[name] = "postgresql://" if field.is_required() else field.get_default(call_default_factory=True)
    return sound


_RULES = {
    "bool_": "must be true or false",
    "int_": "must be a whole number",
    "float_": "must be a number of seconds",
    "string_": "must be text",
    "path_": "must be a path",
}


def _line(fault: ErrorDetails) -> str:
    """Return pydantic's finding as one line: the variable, the value unless it is secret, the rule."""
    name, found, context = str(fault["loc"][0]), fault["type"], fault.get("ctx", {})
    variable = variable_of(name)
    if found == "line":
        return str(context["line"])
    if found == "missing":
        return f"{variable} must be set, for example to postgresql://user@host:5432/database"
    if found == "extra_forbidden":
        return _no_setting(variable)
    if found == "literal_error":
        rule = f"must be {context['expected'].replace(chr(39), '')}"
    else:
        by_type = (rule for beginning, rule in _RULES.items() if found.startswith(beginning))
        rule = context["rule"] if found == "rule" else next(by_type, fault["msg"])
    return f"{variable} {rule}" if name in _HIDDEN else f"{variable}={_as_given(fault['input'])} {rule}"


def _as_given(value: Any) -> str:
    """Return a value as it was written when it is a number, else quoted."""
    if isinstance(value, Path):
        return shown(str(value))
    try:
        number = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        number = False
    return printable(str(value).strip(), 80) if number else shown(value)


def _known_variables() -> list[str]:
    variables = [variable_of(name) for name in Settings.model_fields]
    return variables + [f"{variable_of(name)}_FILE" for name in _FROM_FILES]


def _no_setting(variable: str) -> str:
    if variable == "JSWORKER_HEARTBEAT_TIMEOUT":  # the command line's other name for the watchdog's
        close = ["WATCHDOG_TIMEOUT"]
    else:
        names = [known.removeprefix(_PREFIX) for known in _known_variables()]
        close = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, n=1)
    advice = f": did you mean {_PREFIX}{close[0]}?" if close else ""
    return f"{printable(variable, 200)} is no setting{advice}"


def _is_service_link(variable: str, value: str) -> bool:
    """Tell whether Kubernetes set it, for a Service whose name begins with jsworker."""
    return bool(_SERVICE_LINK.fullmatch(variable)) or value.startswith(("tcp://", "udp://", "sctp://"))
