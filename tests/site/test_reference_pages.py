"""docs/reference: settings, events and metrics are what the code says."""

import builtins
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def _with_members(documented: Any) -> Iterator[Any]:
    yield documented
    if inspect.isclass(documented):
        yield from (
            getattr(documented, name) for name in dir(documented) if name[0] != "_" or name == "__init__"
        )


def _raised(text: str) -> set[str]:
    """Return the names of the errors that a docstring says are raised, in its section or in a sentence."""
    _, _, section = inspect.cleandoc(text).partition("Raises:\n")
    lines = re.findall(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*): ", section, re.MULTILINE)
    sentences = re.findall(r"\b[Rr]aises? ((?:[A-Z][a-z]+[A-Z]\w+(?:, (?:and )?| and | or )?)+)", text)
    return set(re.findall(r"\w*[A-Z]\w+", " ".join([*lines, *sentences])))


def test_every_error_that_the_reference_names_can_be_imported() -> None:
    pages = "\n".join(page.read_text() for page in FOLDER.glob("*.md"))
    documented = [pkgutil.resolve_name(path) for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)]
    members = [member for each in documented for member in _with_members(each)]
    named = {name for each in members for name in _raised(inspect.getdoc(each) or "")}
    assert {"DatabaseRefused", "InvalidPayload", "TimeoutError", "WorkflowFailed"} <= named
    foreign = {"DatabaseError", "ValidationError"}  # of Django and of pydantic
    public = {*jsworker.__all__, *jsworker.testing.__all__, *vars(builtins), *foreign}
    assert named - public == set()


def test_the_page_for_every_day_names_every_command() -> None:
    text = (DOCS / "operating.md").read_text()
    assert [name for name in _COMMANDS if f"jsworker {name}" not in text] == []
