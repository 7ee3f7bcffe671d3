"""Every setting as an option of a command, made from the settings themselves."""

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from jsworker.core.settings import Settings

_ALIASES = {"watchdog_timeout": "--heartbeat-timeout"}
_MARKDOWN = re.compile(r"[\\`*_<]")
_OTHERS = "Other settings"
_PANELS = {
    "Servers and logins (better set by variables: options show in lists of processes)": (
        *("database_url", "database_password", "nats_url", "nats_user", "nats_password", "nats_token"),
        *("nats_creds_file", "nats_nkey_seed_file", "nats_tls_ca", "nats_tls_cert", "nats_tls_key"),
        "nats_inbox_prefix",
    ),
    "Stream": ("stream", "subject_prefix", "stream_replicas", "ack_wait"),
    "Jobs": (
        *("concurrency", "processes", "max_attempts", "max_stalls", "job_timeout", "progress_timeout"),
        *("max_payload_bytes", "max_result_bytes", "max_checkpoint_bytes", "retention", "event_loop"),
    ),
    "Recovery": (
        *("heartbeat_interval", "crash_threshold", "stale_threshold", "scan_interval", "relay_interval"),
        *("recovery", "recover_on_start", "statement_timeout", "watchdog_timeout", "startup_timeout"),
        *("shutdown_timeout", "grace_period"),
    ),
    "Who this worker is": ("worker_id", "hostname", "pod_uid", "container"),
    "Health and logs": ("http_host", "http_port", "log_format", "log_level"),
}


def with_setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that takes ``**settings`` an option for each of them, for typer to find.

    The command gets every value as text, None for an option that was not given: the settings' own rules check
    it, and their errors name the variable.
    """
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [_parameter(name, field) for name, field in Settings.model_fields.items()]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # inspect reads it
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    names = [f"--{name.replace('_', '-')}"] + ([_ALIASES[name]] if name in _ALIASES else [])
    option = typer.Option(
        *names, metavar=_metavar(name, field), help=_help(field), rich_help_panel=_panel(name)
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _panel(name: str) -> str:
    return next((panel for panel, names in _PANELS.items() if name in names), _OTHERS)


def _help(field: FieldInfo) -> str:
    """Return what the setting means, and its default unless that is made at the start or is none."""
    description = _MARKDOWN.sub(r"\\\g<0>", str(field.description))
    default = None if field.is_required() or field.default_factory else field.default
    match default:
        case None:
            return description
        case bool():
            shown = str(default).lower()
        case float():
            shown = f"{default:g}"
        case _:
            shown = str(default)
    return f"{description} [default: {shown}]"


def _metavar(name: str, field: FieldInfo) -> str:
    wanted = _plain(field.annotation)
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        return "|".join(choices) if len(choices) < 3 else "LEVEL"
    if name.endswith("_url"):
        return "URL"
    by_type = {bool: "true|false", int: "NUMBER", float: "SECONDS", Path: "PATH", SecretStr: "SECRET"}
    return by_type.get(wanted, "NAME")


def _plain(annotation: Any) -> Any:
    """Return a type without None and without its rules."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return _plain(next(each for each in get_args(annotation) if each is not types.NoneType))
    return annotation
