"""Loading the settings of a process, and what settings demand of each other."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from jsworker.core.errors import SettingsError
from jsworker.core.settings.environment import is_service_link, known_variables, no_setting
from jsworker.core.settings.model import FieldFaults, Settings
from jsworker.core.settings.timing import durations, kind_faults, timing_faults
from jsworker.core.settings.urls import database_parts
from jsworker.core.settings.variables import PREFIX, variable_of


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
    except FieldFaults as error:
        faults, unsound = error.lines, error.names
        settings = Settings(**_without(unsound, overrides))
    faults += [*_misfits(settings, unsound), *timing_faults(durations(settings, unsound))]
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
    values = durations(settings)
    faults = list(timing_faults(values))
    for kind, threshold in thresholds.items():
        if threshold is not None and threshold != settings.stale_threshold:
            faults += kind_faults(kind, threshold, values)
    if faults:
        raise SettingsError("\n".join(faults))


def unknown_variables() -> list[str]:
    """Return a line of warning for each variable that begins like a setting and is none."""
    known = set(known_variables(Settings.model_fields))
    return [
        no_setting(variable, Settings.model_fields)
        for variable, value in sorted(os.environ.items())
        if variable.startswith(PREFIX) and variable not in known and not is_service_link(variable, value)
    ]


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
    if settings.database_password and database_parts(settings.database_url)["password"]:
        variables = "JSWORKER_DATABASE_PASSWORD and a password in JSWORKER_DATABASE_URL"
        yield f"{variables} must not be set together: keep one"


def _without(unsound: frozenset[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides that leave out the faulty settings, so that the others can be checked all the same."""
    sound = {name: value for name, value in overrides.items() if name not in unsound}
    for name in unsound & Settings.model_fields.keys():
        field = Settings.model_fields[name]
        sound[name] = "postgresql://" if field.is_required() else field.get_default(call_default_factory=True)
    return sound
