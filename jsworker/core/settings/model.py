"""The settings: every variable with its type, its default and its rule."""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, unquote_to_bytes

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from jsworker.core.aes_gcm import read_keys
from jsworker.core.errors import SettingsError
from jsworker.core.settings.cores import usable_cores
from jsworker.core.settings.variables import (
    FROM_FILES,
    HIDDEN,
    LONGEST_SECONDS,
    NATS_SERVER,
    PREFIX,
    as_given,
    broken,
    database_parts,
    from_environment,
    names_from_files,
    no_setting,
    redact_url,
    refused,
    shown_url,
    variable_of,
)


def _rule(text: str, holds: Callable[[Any], object]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise broken(text)
        return value

    return AfterValidator(check)


def _between(lowest: float, highest: int) -> AfterValidator:
    return _rule(f"must be from {lowest} to {highest}", lambda value: lowest <= value <= highest)


def _matching(pattern: str, text: str) -> AfterValidator:
    return _rule(text, re.compile(pattern).fullmatch)


def _are_rules(value: str) -> bool:
    return value in ("on", "off") or {rule.strip() for rule in value.split(",")} <= RECOVERY_RULES.keys()


def _is_target(text: str) -> bool:
    return not text.strip() or all(text.strip().partition(":"))


def _readable(path: Path) -> Path:
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise broken(f"cannot be read: {error.strerror}") from None


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _none(value: Any) -> Any:
    return None if _lower(value) in ("", "none") else value


def _unset(value: Any) -> Any:
    return None if value == "" else value


def _no_service_link(value: Any) -> Any:
    # Kubernetes sets JSWORKER_HTTP_PORT=tcp://... in every pod beside a Service named jsworker-http.
    return None if str(value).startswith("tcp://") else value


RECOVERY_RULES: Final = {
    "supervisor": "jobs of a worker process whose end its supervisor has seen",
    "start": "jobs of earlier lives of this host or container, when a worker starts",
    "crashed": "jobs of owners that are silent and do not answer on NATS",
    "stale": "jobs of owners that are silent for longer than their stale threshold",
}
"""The jobs that workers take back without an operator, by rule; each rule can be switched off."""

_DURATION_RULE = f"must be greater than 0 and at most {LONGEST_SECONDS}"
Seconds = Annotated[float, _rule(_DURATION_RULE, lambda value: 0 < value <= LONGEST_SECONDS)]
SecondsOrNone = Annotated[Seconds | None, BeforeValidator(_none)]
# Below these bounds a worker would do nothing else, or end all that it has begun.
SecondsFromAHundredth = Annotated[float, _between(0.01, LONGEST_SECONDS)]
SecondsFromATenth = Annotated[float, _between(0.1, LONGEST_SECONDS)]
SecondsFromOne = Annotated[float, _between(1, LONGEST_SECONDS)]
Count = Annotated[int, _between(1, 1_000_000)]
Bytes = Annotated[int, _between(1, 2**28 - 1)]
ReadableFile = Annotated[Annotated[Path, AfterValidator(_readable)] | None, BeforeValidator(_unset)]
_NAME_RULE = (
    "must hold only letters, digits, '-' and '_', in parts joined by single dots, at most 200 characters"
)
HostName = Annotated[str, _matching(r"(?!.{201})[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", _NAME_RULE)]
Word = Annotated[str, _matching("[!-~]{1,200}", "must be 1 to 200 visible ASCII characters")]


class FieldFaults(SettingsError):
    """What is wrong with single settings: a line for each, by the setting's name."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        super().__init__("\n".join(lines.values()))
        self.names = frozenset(lines)


class Settings(BaseSettings):
    """The settings of a worker or a client; durations are seconds.

    Made by ``load_settings``, which also checks the rules between settings. Secrets do not appear in a
    repr, a dump or an error.

    Raises:
        SettingsError: values are wrong or missing, one line each.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    database_url: str = Field(
        repr=False, exclude=True, description="PostgreSQL: postgresql://user@host:port/database"
    )
    database_password: SecretStr | None = Field(None, description="password, when the URL holds none")
    nats_url: str = Field(
        "nats://127.0.0.1:4222",
        repr=False,
        exclude=True,
        description="NATS servers: nats://host:port, comma-separated; unset: producers use none",
    )
    nats_user: str | None = Field(None, description="NATS user name")
    nats_password: SecretStr | None = Field(None, description="NATS password")
    nats_token: SecretStr | None = Field(None, description="NATS token")
    nats_creds_file: ReadableFile = Field(None, description="path of a NATS credentials file")
    nats_nkey_seed_file: ReadableFile = Field(None, description="path of a NATS nkey seed file")
    nats_tls_ca: ReadableFile = Field(None, description="path of the CA certificates of the NATS servers")
    nats_tls_cert: ReadableFile = Field(None, description="path of the client's certificate for NATS")
    nats_tls_key: ReadableFile = Field(None, description="path of the client's private key for NATS")
    nats_inbox_prefix: Annotated[
        str,
        _matching(
            r"(?!.{101})[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*",
            "must be dot-separated words of letters, digits, '_' and '-', at most 100 characters",
        ),
    ] = Field("_INBOX", description="beginning of the subjects on which NATS answers to this process")
    stream: Annotated[
        str,
        _matching(r"(?:(?![.*>/\\])[!-~]){1,200}", "must hold no spaces, dots, wildcards or slashes"),
    ] = Field("JOBS", description="name of the JetStream stream")
    subject_prefix: Annotated[
        str,
        _matching(
            r"(?!.{201})[a-z0-9_-]+(\.[a-z0-9_-]+)*", "must be dot-separated words of a-z, 0-9, '_' and '-'"
        ),
        _rule(
            "must not begin with jsworker.worker, jsworker.awaited or jsworker.ended, where workers answer "
            "and hints at results are sent",
            lambda prefix: not re.match(r"jsworker\.(worker|awaited|ended)(\.|$)", prefix),
        ),
    ] = Field("jobs", description="subjects are <prefix>.<kind>")
    publish_events: bool = Field(
        False, description="publish the outcomes of jobs to subscribers of <prefix>.events.*.*"
    )
    stream_replicas: Annotated[int, _between(1, 5)] = Field(1, description="replicas of the stream")
    concurrency: Annotated[int, _between(1, 10_000)] = Field(10, description="job slots of each process")
    processes: Annotated[int, _between(1, 1000)] = Field(1, description="worker processes")
    preload: Annotated[
        str, _matching(r"\s*(\w+(\.\w+)*\s*(,\s*\w+(\.\w+)*\s*)*)?", "must be a comma list of modules")
    ] = Field("", description="modules that are imported before all others where jobs run: a comma list")
    middleware: Annotated[
        str,
        _rule("must be a comma list of MODULE:NAME", lambda value: all(map(_is_target, value.split(",")))),
    ] = Field("", description="middleware around all jobs: a comma list of MODULE:NAME, the first outermost")
    isolated_processes: Annotated[int, _between(1, 1000)] = Field(
        default_factory=usable_cores,
        description="child processes of each worker process for jobs of kinds with isolation; "
        "default: the cores that it may use",
    )
    event_loop: Annotated[Literal["auto", "asyncio", "uvloop"], BeforeValidator(_lower)] = Field(
        "auto",
        description="event loop of worker processes: asyncio, uvloop, or auto: uvloop where it is installed",
    )
    heartbeat_interval: SecondsFromAHundredth = Field(5.0, description="seconds between heartbeats")
    crash_threshold: SecondsOrNone = Field(
        15.0, description="seconds of silence after which NATS is asked whether the owner lives; none: never"
    )
    stale_threshold: Seconds = Field(
        300.0, description="seconds of silence after which any worker may take a job back"
    )
    scan_interval: SecondsFromAHundredth = Field(
        5.0, description="seconds between searches for stale and lost jobs"
    )
    relay_interval: SecondsFromAHundredth = Field(
        0.5, description="seconds between publishing what waits and what is due"
    )
    recovery: Annotated[
        str,
        BeforeValidator(_lower),
        _rule(f"must be on, off or a comma list of: {', '.join(RECOVERY_RULES)}", _are_rules),
    ] = Field(
        "on",
        description=f"which jobs workers take back: on, off or a comma list of {', '.join(RECOVERY_RULES)}",
    )
    recover_on_start: bool = Field(
        True, description="take back jobs of previous processes on this host at start"
    )
    ack_wait: Seconds = Field(
        600.0, description="seconds until JetStream delivers an unanswered message again"
    )
    statement_timeout: SecondsFromAHundredth = Field(
        3.0, description="seconds that one database statement may take"
    )
    watchdog_timeout: SecondsFromATenth = Field(
        120.0, description="seconds without a tick of its event loop until a process is killed"
    )
    startup_timeout: SecondsFromOne = Field(
        600.0,
        description="seconds that setup() may hold the event loop of a starting process until it is killed, "
        "and that an isolated process may take to start",
    )
    shutdown_timeout: Seconds = Field(25.0, description="seconds that running jobs get to end at shutdown")
    grace_period: SecondsOrNone = Field(
        None, description="the pod's termination grace period in seconds, for a check; none: no check"
    )
    max_attempts: Count = Field(5, description="attempts that may end in an error before a job fails")
    max_stalls: Count = Field(3, description="runs taken back from a silent owner before a job fails")
    job_timeout: SecondsOrNone = Field(
        86_400.0,
        description="seconds that one run of a kind without a timeout of its own may take; none: no limit",
    )
    progress_timeout: SecondsOrNone = Field(
        None, description="seconds without a sign of life from the job itself; none: no limit"
    )
    max_payload_bytes: Bytes = Field(2**20, description="largest payload in bytes")
    max_result_bytes: Bytes = Field(2**20, description="largest result in bytes")
    max_checkpoint_bytes: Bytes = Field(2**20, description="largest checkpoint in bytes")
    encryption_keys: SecretStr | None = Field(
        None, description="keys for job content, of which the first one encrypts: NAME:BASE64,…"
    )
    encrypted_only: bool = Field(False, description="refuse what jobs hold unless it is encrypted")
    codec: Annotated[Word | None, BeforeValidator(_unset)] = Field(
        None, description="MODULE:NAME of a codec of your own, instead of keys"
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
        None, description="name of this container in its pod; each container of a pod needs its own"
    )
    http_host: Word = Field(
        "127.0.0.1", description="address on which health and metrics are served; `::`: IPv6 and IPv4"
    )
    http_port: Annotated[
        Annotated[int, _between(0, 65_535)] | None, BeforeValidator(_none), BeforeValidator(_no_service_link)
    ] = Field(None, description="port of health and metrics; 0: any free one; none: not served")
    log_format: Annotated[Literal["json", "console"], BeforeValidator(_lower)] = Field(
        default_factory=lambda: "console" if sys.stderr and sys.stderr.isatty() else "json",
        description="json or console; default: console on a terminal, else json",
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)
    ] = Field("info", description="minimum level that is logged: debug, info, warning, error or critical")
    status_interval: Annotated[SecondsFromATenth | None, BeforeValidator(_none)] = Field(
        60.0,
        description="seconds between status lines of a worker that is not idle; none: no such lines",
    )

    _from_files: frozenset[str] = PrivateAttr(frozenset())

    def __init__(self, **values: Any) -> None:
        faults: dict[str, str] = {}
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = {str(fault["loc"][0]): _line(fault) for fault in error.errors(include_url=False)}
        if faults:  # raised outside of the except block: a chained ValidationError would show the values
            values.clear()
            raise FieldFaults(faults)
        self._from_files = names_from_files() - values.keys()

    @property
    def from_files(self) -> frozenset[str]:
        """The names of the settings that came from files, which ``read_again`` reads."""
        return self._from_files

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Settings":
        """Return a copy with the values of ``update``, as text or typed; no file replaces them.

        Raises SettingsError if one is wrong, or is no setting. Rules between settings are not checked.
        """
        if update:
            checked = type(self)(**{**dict(self), **update})
            update = {name: getattr(checked, name) for name in update}
        copy = super().model_copy(update=update, deep=deep)
        copy._from_files = self._from_files.difference(update or ())  # noqa: SLF001 -- its own class
        return copy

    def with_files(self, names: frozenset[str]) -> "Settings":
        """Return a copy in which the settings of these names count as ``from_files``."""
        copy = self.model_copy()
        copy._from_files = names  # noqa: SLF001 -- its own class
        return copy

    def read_again(self, names: Iterable[str]) -> "Settings":
        """Return these settings, with those of ``names`` that came from files as the files hold them now.

        Raises SettingsError if a file cannot be read, or holds a wrong value.
        """
        again = self._from_files.intersection(names)
        if not again:
            return self
        return type(self)(**{name: value for name, value in self if name not in again})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,  # pydantic's own sources do not support the variables JSWORKER_..._FILE
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer the given values to those of the environment."""
        return init_settings, InitSettingsSource(settings_cls, from_environment(settings_cls.model_fields))

    @field_validator(*FROM_FILES, mode="before")
    @classmethod
    def _check_source(cls, value: Any) -> Any:
        if isinstance(value, PydanticCustomError):  # found while the environment was read
            raise value
        return value

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        database_parts(url.strip())
        return url.strip()

    @field_validator("encryption_keys")
    @classmethod
    def _check_encryption_keys(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys is not None:
            try:
                read_keys(keys.get_secret_value())
            except ValueError as error:
                raise broken(str(error)) from None
        return keys

    @field_validator("nats_url")
    @classmethod
    def _check_nats_url(cls, urls: str) -> str:
        servers = [server.strip() for server in urls.split(",")]
        for server in servers:
            if not NATS_SERVER.fullmatch(server):
                rule = "must read nats://host:port or tls://host:port, special characters percent-encoded"
                # A part without a scheme may be one of a password that holds commas.
                fault = "" if "," in urls and "://" not in server else server
                raise refused(f"{shown_url('nats_url', fault)} {rule}")
        return ",".join(servers)

    def database_dsn(self) -> str:
        """Return the URL to connect with: ``postgresql://``, the password in it, percent-encoded."""
        parts = database_parts(self.database_url)
        given = self.database_password
        password = given.get_secret_value().encode() if given else unquote_to_bytes(parts["password"])
        user = quote(unquote_to_bytes(parts["user"]), safe="")
        login = f"{user}:{quote(password, safe='')}" if password else user
        return f"postgresql://{login}@{parts['place']}" if login else f"postgresql://{parts['place']}"

    def current_database_dsn(self) -> str:
        """Return ``database_dsn()`` of the URL and the password that their files hold now.

        Raises OSError if one of the files cannot be used.
        """
        try:
            return self.read_again(("database_url", "database_password")).database_dsn()
        except SettingsError as error:
            raise OSError(str(error)) from None

    @property
    def nats_is_set(self) -> bool:
        """Whether ``nats_url`` is set; if not, a producer does without NATS and a worker uses the default."""
        return "nats_url" in self.model_fields_set

    def recovers_by(self) -> dict[str, bool]:
        """Return for each of ``RECOVERY_RULES`` whether jobs are taken back by it."""
        named = {rule.strip() for rule in self.recovery.split(",")}
        rules = {rule: self.recovery == "on" or rule in named for rule in RECOVERY_RULES}
        return rules | {"start": rules["start"] and self.recover_on_start}

    def redacted_database_url(self) -> str:
        """Return the database's URL without its password."""
        return redact_url(self.database_dsn())

    def redacted_nats_url(self) -> str:
        """Return the NATS servers without credentials."""
        return ",".join(redact_url(server) for server in self.nats_url.split(","))


def payload_limit() -> int:
    """Return JSWORKER_MAX_PAYLOAD_BYTES or its default; raise SettingsError if it is wrong."""
    return _payload_limit(os.environ.get(variable_of("max_payload_bytes")))


@lru_cache(maxsize=1)
def _payload_limit(given: str | None) -> int:
    name = "max_payload_bytes"
    try:
        default: int = Settings.model_fields[name].default
        return default if given is None else TypeAdapter(Bytes).validate_python(given)
    except ValidationError as error:
        [fault] = error.errors(include_url=False)
        raise SettingsError(_line({**fault, "loc": (name,)})) from None


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
        return no_setting(variable, Settings.model_fields)
    if found == "literal_error":
        rule = f"must be {context['expected'].replace(chr(39), '')}"
    else:
        by_type = (rule for beginning, rule in _RULES.items() if found.startswith(beginning))
        rule = context["rule"] if found == "rule" else next(by_type, fault["msg"])
    return f"{variable} {rule}" if name in HIDDEN else f"{variable}={as_given(fault['input'])} {rule}"
