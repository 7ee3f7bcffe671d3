"""For tests of applications: real servers, one job without any, all jobs, assertions, moved time, kills.

The same functions, blocking, are in ``jsworker.testing.sync``. Nothing here needs pytest; the fixtures for
pytest are in ``jsworker.testing.plugin``, which pytest finds by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.testing.enqueued import assert_enqueued, assert_not_enqueued
    from jsworker.testing.killing import (
        AfterSeconds,
        AtEnd,
        AtProgress,
        AtStep,
        KilledJob,
        kill_worker_during,
    )
    from jsworker.testing.shared_servers import RunningServers, running_servers
    from jsworker.testing.unit_lease import JobRun
    from jsworker.testing.unit_run import run_job, run_of
    from jsworker.testing.unittest_case import JsworkerTestCase
    from jsworker.testing.work import RunError, WorkDone, advance, work_until_empty

_NAMES = {
    "jsworker.testing.enqueued": "assert_enqueued assert_not_enqueued",
    "jsworker.testing.killing": "AfterSeconds AtEnd AtProgress AtStep KilledJob kill_worker_during",
    "jsworker.testing.shared_servers": "RunningServers running_servers",
    "jsworker.testing.unit_lease": "JobRun",
    "jsworker.testing.unit_run": "run_job run_of",
    "jsworker.testing.unittest_case": "JsworkerTestCase",
    "jsworker.testing.work": "RunError WorkDone advance work_until_empty",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AfterSeconds",
    "AtEnd",
    "AtProgress",
    "AtStep",
    "JobRun",
    "JsworkerTestCase",
    "KilledJob",
    "RunError",
    "RunningServers",
    "WorkDone",
    "advance",
    "assert_enqueued",
    "assert_not_enqueued",
    "kill_worker_during",
    "run_job",
    "run_of",
    "running_servers",
    "work_until_empty",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use: pytest loads this package wherever jsworker is installed."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
