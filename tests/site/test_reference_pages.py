"""docs/reference: settings, events and metrics are what the code says."""

from pathlib import Path

import pytest

import jsworker
import jsworker.testing
from jsworker.cli.app import _COMMANDS
from jsworker.core.events import EVENT_NAMES
from tests.deployment.metric_names import FLEET_WIDE, PER_PROCESS, SUPERVISORS

from .conftest import DOCS
from .document_reference import FOLDER, meanings, pages


@pytest.mark.parametrize("name", pages())
def test_a_page_from_the_code_is_in_step(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], "run python -m tests.site.document_reference"


def test_every_event_says_what_it_tells() -> None:
    assert meanings().keys() == EVENT_NAMES


def test_every_metric_is_there() -> None:
    rows = pages()["metrics.md"].count("\n| `jsworker_")
    assert rows == len(PER_PROCESS) + len(FLEET_WIDE) + len(SUPERVISORS)


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(Path(page).read_text() for page in FOLDER.glob("*.md"))
    named = set(text.splitlines())
    missing = [
        f"{module.__name__}.{name}"
        for module in (jsworker, jsworker.testing)
        for name in module.__all__
        if name not in ("__version__", "EventName") and f"::: {module.__name__}.{name}" not in named
    ]
    assert missing == []


def test_the_page_for_every_day_names_every_command() -> None:
    text = (DOCS / "operating.md").read_text()
    assert [name for name in _COMMANDS if f"jsworker {name}" not in text] == []
