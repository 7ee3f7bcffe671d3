"""Kinds: the waiting and running jobs of each, its workers, and its limits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from jsworker.dashboard.visit import Visit
from jsworker.ownership.queries import job_report
from jsworker.ownership.queries.status import BOUND, KindState, read_status
from jsworker.ownership.transitions.limits import count_keys, limits_of_kinds

_KINDS: Final = 100
_Number = Annotated[float, Field(ge=0, lt=1e12)]
_Count = Annotated[int, Field(ge=0, lt=10**12)]


@dataclass(slots=True)
class KindLine:
    """A kind as it is shown.

    Attributes:
        state: the numbers of its jobs.
        limit: its limits, as ``Limits.list`` returns them; None: it has none.
        keys: the number of its limit keys that are set, paused or used, counted up to ``BOUND``.
        by_key: whether its limits are limits of each key, as far as is known.
        slots: job slots of the live workers that serve it and claim jobs: neither drained nor ending.
        versions: versions of the live workers that serve it.
        declared: the different limits that the classes of live workers declare.
        without_timeout: whether the class of a live worker has neither a timeout nor a progress_timeout.
    """

    state: KindState
    limit: Mapping[str, Any] | None = None
    keys: int = 0
    by_key: bool = False
    slots: int = 0
    versions: set[str] = field(default_factory=set)
    declared: list[str] = field(default_factory=list)
    without_timeout: bool = False


@dataclass(frozen=True, slots=True)
class BackoffSettings:
    """See ``Backoff``; seconds."""

    first: _Number
    factor: _Number
    longest: _Number


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How workers run a kind, see ``shown_settings``; times in seconds."""

    max_attempts: _Count
    max_stalls: _Count
    backoff: BackoffSettings
    timeout: _Number | None
    progress_timeout: _Number | None
    stale_threshold: _Number | None
    concurrency: _Count
    priority: str
    isolation: str | None
    max_jobs_per_process: _Count | None
    max_memory_mb: _Number | None


_RUN_SETTINGS: Final = TypeAdapter(RunSettings)


@dataclass(frozen=True, slots=True)
class SettingsLine:
    """How a number of live workers run a kind; ``settings``: None if this version cannot read them."""

    kind: str
    workers: int
    settings: RunSettings | None
    differs: bool


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return the first kinds, or those after a given one."""
    reads = visit.site.reads
    status = await read_status(reads, limit=_KINDS, after=visit.get("after"))
    lines = {each.kind: KindLine(each) for each in status.kinds}
    for kind, limit in (await limits_of_kinds(reads, list(lines))).items():
        lines[kind].limit = limit
    for kind, keys in (await count_keys(reads, list(lines))).items():
        lines[kind].keys, lines[kind].by_key = keys, keys > 0
    for worker in await reads.run(job_report.WORKERS):
        for kind in worker.kinds if worker.alive else ():
            if (line := lines.get(kind)) is not None:
                _add_worker(line, kind, worker)
    return {
        "lines": list(lines.values()),
        "settings": await _settings(visit, list(lines)),
        "after": status.after,
        "bound": BOUND,
        "enqueues": visit.may("enqueue"),
    }


async def _settings(visit: Visit, kinds: list[str]) -> list[SettingsLine]:
    rows = await visit.site.reads.run(job_report.KIND_SETTINGS, {"kinds": kinds})
    many = Counter(row.name for row in rows)
    return [
        SettingsLine(row.name, row.workers, _read_settings(row.settings), many[row.name] > 1) for row in rows
    ]


def _read_settings(stored: Any) -> RunSettings | None:
    try:
        return _RUN_SETTINGS.validate_python(stored)
    except ValidationError:
        return None


def _add_worker(line: KindLine, kind: str, worker: Any) -> None:
    line.slots += worker.concurrency if worker.state == "running" else 0
    line.versions.add(worker.version)
    line.without_timeout |= kind in worker.kinds_without_timeout
    limit = job_report.declared_limit(worker.limits, kind)
    line.by_key |= bool(limit.get("key"))
    declared = in_words(limit)
    if declared and declared not in line.declared:
        line.declared.append(declared)


def in_words(limit: Mapping[str, Any]) -> str:
    """Return the numbers of a limit in words; empty: nothing is limited."""
    running = "" if limit.get("max_running") is None else f"{limit['max_running']} at once"
    per = limit.get("per")
    shown_per = f"{per:g}" if isinstance(per, int | float) else per
    rate = "" if limit.get("rate") is None else f"{limit['rate']} per {shown_per} s"
    each = f" for each {limit['key']}" if limit.get("key") else ""
    return ", ".join(filter(None, (running, rate))) + each
