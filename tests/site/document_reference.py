"""Writes the pages of docs/reference that are made from the code.

python -m tests.site.document_reference
"""

import ast
import logging
import tokenize
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic_core import PydanticUndefined

from jsworker.core import events
from jsworker.core.settings import Settings, variable_of
from jsworker.core.settings.variables import FROM_FILES
from jsworker.supervisor.children import FleetView
from jsworker.supervisor.probes import families
from jsworker.telemetry.logs import level_of
from jsworker.telemetry.metrics import Metrics, _of_worker, of_fleet, of_logs
from jsworker.telemetry.worker_status import Fleet, IsolatedProcesses, KindLabels, Readiness, WorkerStatus
from tests.deployment.metric_names import FLEET_WIDE, PER_PROCESS, SUPERVISORS

FOLDER = Path(__file__).parents[2] / "docs/reference"
_NOTE = "<!-- Written by `python -m tests.site.document_reference`; do not edit. -->"
_SETTINGS = f"""# Settings

{_NOTE}

Every setting is an environment variable and an option of `jsworker run`: `JSWORKER_ACK_WAIT=600` is
`--ack-wait 600`. Durations are in seconds. If settings are invalid, the command exits with code 2 and one
line for each, which names the variable, the value and the rule. An empty variable means `none` where that is
allowed (`JSWORKER_RETENTION=` keeps ended jobs for ever), "not set" for the settings that can be read from a
file, and is invalid for most others.

These settings can also be read from a file, whose path is in the variable with `_FILE` appended to its name:
{", ".join(f"`{variable_of(name)}`" for name in FROM_FILES)}.

| variable | default | meaning |
|---|---|---|
"""
_EVENTS = f"""# Events

{_NOTE}

`worker.on(name, listener)` calls `listener(event)` for each event with this name, `worker.on("*", listener)`
for every event. Each event is also a line of the [log](../logs.md), at this level, with its `fields`.

| event | level | meaning |
|---|---|---|
"""
_METRICS = f"""# Metrics

{_NOTE}

These are the metrics of `/metrics` ([Probes and metrics](../monitoring.md)). Histograms also have `_sum` and
`_count`.
"""
_MORE = {
    "preload": "middleware.md",
    "middleware": "middleware.md",
    "isolated_processes": "isolation.md",
    "publish_events": "other-languages.md",
    "recovery": "guarantees.md",
    "encryption_keys": "encryption.md",
    "encrypted_only": "encryption.md",
    "codec": "encryption.md",
    "log_level": "logs.md",
    "http_port": "monitoring.md",
}
"""Pages that say more of a setting."""


def pages() -> dict[str, str]:
    """Return each page by its name."""
    return {
        "settings.md": _SETTINGS + "".join(map(_setting, Settings.model_fields)),
        "events.md": _EVENTS + "".join(_event(*one) for one in meanings().items()),
        "metrics.md": _METRICS
        + _table("For each worker process", "They also have the label `process`.", PER_PROCESS)
        + _table(
            "For the whole installation",
            "Every pod reports the same: take the maximum, not the sum.",
            FLEET_WIDE,
        )
        + _table("For the supervisor", "Once for each pod.", SUPERVISORS),
    }


def meanings() -> dict[str, str]:
    """Return what each event tells: the comment beside its name."""
    with Path(events.__file__).open("rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    return {
        ast.literal_eval(name.string): comment.string.removeprefix("# ")
        for name, comma, comment in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if (name.type, comma.string, comment.type) == (tokenize.STRING, ",", tokenize.COMMENT)
    }


def _setting(name: str) -> str:
    field = Settings.model_fields[name]
    more = f" ([more](../{_MORE[name]}))" if name in _MORE else ""
    return f"| `{variable_of(name)}` | {_default(field)} | {_cell(str(field.description))}{more} |\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "must be set"
    if field.default is PydanticUndefined:
        return "detected"
    if field.default in (None, ""):
        return "none"
    value = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return f"`{value.removesuffix('.0')}`"


def _event(name: str, meaning: str) -> str:
    return f"| `{name}` | {logging.getLevelName(level_of(name)).lower()} | {_cell(meaning)} |\n"


def _table(title: str, text: str, metrics: Mapping[str, AbstractSet[str]]) -> str:
    told = dict(_documentation())
    rows = [f"\n## {title}\n\n{text}\n\n| metric | labels | meaning |\n|---|---|---|\n"]
    for name, labels in metrics.items():
        family = name.removesuffix("_total").removesuffix("_bucket")
        labelled = ", ".join(f"`{label}`" for label in sorted(labels - {"le"}))
        rows.append(f"| `{name.removesuffix('_bucket')}` | {labelled} | {_cell(told[family])} |\n")
    return "".join(rows)


def _documentation() -> Iterator[tuple[str, str]]:
    """Yield what each metric says of itself, of a worker and a supervisor with nothing to tell."""
    registry = CollectorRegistry()
    Metrics(registry)
    readiness = Readiness(
        postgresql=True, nats=True, migration=None, pulling=True, draining=False, problems=()
    )
    status = WorkerStatus(readiness, {}, 0, 0, {}, {}, IsolatedProcesses())
    yield from ((family.name, family.documentation) for family in registry.collect())
    for family in (
        of_logs(),
        *_of_worker(status, KindLabels()),
        *of_fleet(Fleet({}, 0, 0, 0)),
        *families(FleetView((), stopping=False, deaths={}, now=0)),
    ):
        yield family.name, family.documentation


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
