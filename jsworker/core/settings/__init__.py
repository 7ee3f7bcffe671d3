"""Settings: the environment variables ``JSWORKER_…``, their rules, and one clear line for each fault."""

import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs

from jsworker.core.errors import SettingsError
from jsworker.core.settings.model import RECOVERY_RULES as RECOVERY_RULES
from jsworker.core.settings.model import FieldFaults
from jsworker.core.settings.model import Settings as Settings
from jsworker.core.settings.variables import (
    LONGEST_SECONDS,
    PREFIX,
    TEST_SERVERS,
    as_given,
    database_parts,
    is_service_link,
    known_variables,
    no_setting,
)
from jsworker.core.settings.variables import changed_environment as changed_environment
from jsworker.core.settings.variables import redact_url as redact_url
from jsworker.core.settings.variables import variable_of as variable_of

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


def load_settings(**overrides: Any) -> Settings:
    """Return the settings of this process.

    Args:
        **overrides: settings given on the command line, as text or typed; only those given. All others
            come from the environment.

    Raises:
        SettingsError: values are wrong or missing, or contradict each other; one line for each fault, then
            one for each variable that is not a setting.
    """
    faults: list[str] = []
    unsound: frozenset[str] = frozenset()
    try:
        settings = Settings(**overrides)
    except FieldFaults as error:
        faults, unsound = error.lines, error.names
        settings = Settings(**_without(unsound, overrides))
    faults += [*_misfits(settings, unsound), *_timing_faults(_durations(settings, unsound))]
    if faults:
        overrides.clear()  # a traceback that prints local variables shows no secrets
        # A variable that is missing may be set under a misspelled name.
        raise SettingsError("\n".join([*faults, *unknown_variables()]))
    return settings


def check_timing(settings: Settings, thresholds: Mapping[str, float | None]) -> None:
    """Check the rules that hold between durations, also for kinds with a stale threshold of their own.

    Raises SettingsError with one line for each fault. A threshold of None: jobs of the kind never become
    stale.
    """
    values = _durations(settings)
    faults = list(_timing_faults(values))
    for kind, threshold in thresholds.items():
        if threshold is None or threshold == settings.stale_threshold:
            continue
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if is_number and 0 < threshold <= LONGEST_SECONDS:
            faults += _timing_faults({**values, "stale_threshold": threshold}, kind)
        else:
            rule = f"must be a number of seconds greater than 0 and at most {LONGEST_SECONDS}"
            faults.append(f"stale_threshold={as_given(threshold)} of kind {kind} {rule}")
    if faults:
        raise SettingsError("\n".join(faults))


def unknown_variables() -> list[str]:
    """Return a warning line for each variable that begins with ``JSWORKER_`` but is not a setting."""
    known = {*known_variables(Settings.model_fields), *TEST_SERVERS.values()}
    return [
        no_setting(variable, Settings.model_fields)
        for variable, value in sorted(os.environ.items())
        if variable.startswith(PREFIX) and variable not in known and not is_service_link(variable, value)
    ]


def _misfits(settings: Settings, unsound: frozenset[str]) -> Iterator[str]:
    """Yield a line for each setting that lacks its partner, and for settings that exclude each other."""
    for names in (("nats_user", "nats_password"), ("nats_tls_cert", "nats_tls_key")):
        given = [name for name in names if getattr(settings, name) is not None]
        if len(given) == 1 and unsound.isdisjoint(names):
            missing = next(name for name in names if name not in given)
            yield f"{variable_of(given[0])} must come with {variable_of(missing)}"
    logins = ("nats_user", "nats_token", "nats_creds_file", "nats_nkey_seed_file")
    given = [variable_of(name) for name in logins if getattr(settings, name) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)} must not be set together: keep one login"
    if settings.encryption_keys is not None and settings.codec is not None:
        yield "JSWORKER_ENCRYPTION_KEYS and JSWORKER_CODEC must not be set together: keep one"
    if settings.database_password and _holds_password(settings.database_url):
        variables = "JSWORKER_DATABASE_PASSWORD and a password in JSWORKER_DATABASE_URL"
        yield f"{variables} must not be set together: keep one"


def _holds_password(database_url: str) -> bool:
    parts = database_parts(database_url)
    return bool(parts["password"]) or "password" in parse_qs(parts["place"].partition("?")[2])


def _without(unsound: frozenset[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides with defaults for the faulty settings, so that the other settings can be checked."""
    sound = {name: value for name, value in overrides.items() if name not in unsound}
    for name in unsound & Settings.model_fields.keys():
        field = Settings.model_fields[name]
        sound[name] = "postgresql://" if field.is_required() else field.get_default(call_default_factory=True)
    return sound


def _durations(settings: Settings, unsound: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the durations that take part in rules and are set."""
    names = {name for left, _, right in _TIMING for name in (left, *(term for _, term in right))}
    found = {name: getattr(settings, name) for name in names - unsound}
    return {name: value for name, value in found.items() if value is not None}


def _timing_faults(values: Mapping[str, float], kind: str | None = None) -> Iterator[str]:
    """Yield a line for each broken rule; for a kind, check only the rules about the stale threshold."""
    exact = {name: Decimal(repr(value)) for name, value in values.items()}  # as floats 3 × 0.1 exceeds 0.3
    for left, relation, right in _TIMING:
        names = {left, *(name for _, name in right)}
        if not names <= values.keys() or (kind and "stale_threshold" not in names):
            continue
        bound = sum((factor * exact[name] for factor, name in right), Decimal())
        if not (exact[left] > bound or (exact[left] == bound and relation == "must be at least")):
            terms = [
                (f"{factor} × " if factor > 1 else "") + _term(name, values, kind) for factor, name in right
            ]
            yield f"{_term(left, values, kind)} {relation} {' + '.join(terms)}"


def _term(name: str, values: Mapping[str, float], kind: str | None) -> str:
    if kind and name == "stale_threshold":
        return f"stale_threshold={_number(values[name])} of kind {kind}"
    return f"{variable_of(name)}={_number(values[name])}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
