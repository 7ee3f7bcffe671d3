"""docs/sentry.md: its python blocks run, and its settings name what ships."""

import re
from typing import Any

import pytest
import sentry_sdk

from jsworker.contrib.sentry import sentry_scope
from jsworker.core.events import Event, Events
from jsworker.core.targets import load_named
from tests.support.documents import Page

PAGE = Page("docs/sentry.md")
REPORTING, TRACKING = PAGE.blocks("python")


def test_its_module_starts_sentry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTRY_DSN", "https://public@sentry.example/1")
    try:
        exec(REPORTING, {})  # noqa: S102 -- the page's own code
        assert sentry_sdk.get_client().dsn == "https://public@sentry.example/1"
    finally:
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(None)


def test_the_middleware_that_it_names_is_the_one_for_sentry() -> None:
    [named] = re.findall(r"JSWORKER_MIDDLEWARE=(\S+)", PAGE.text)
    assert load_named(named, "middleware", "my_app:timed") is sentry_scope


@pytest.mark.parametrize("name", ["job.error", "job.failed"])
def test_other_trackers_get_exceptions(name: Any) -> None:
    caught: list[tuple[BaseException | None, str, str]] = []

    class Tracker:
        def capture(self, error: BaseException | None, *, kind: str, job_id: str) -> None:
            caught.append((error, kind, job_id))

    names: dict[str, Any] = {}
    exec(TRACKING, names)  # noqa: S102 -- the page's own code
    events = Events()
    names["report_failures"](events, Tracker())
    error = KeyError("no")
    events.emit(name, error, kind="failing", job_id=7)
    assert caught == [(error, "failing", "7")]
    assert "KeyError" not in repr(Event(name, {}, error))
