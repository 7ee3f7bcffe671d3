"""docs/middleware.md: its code does what it says."""

import re
from types import ModuleType
from typing import Any

import pytest

from jsworker import JobClient, Worker
from jsworker.core.settings import Settings
from jsworker.core.targets import load_processor
from tests.support.documents import Page
from tests.worker.rows import Rows

PAGE = Page("docs/middleware.md")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of the page defines, as a module ``my_jobs``."""
    module = ModuleType("my_jobs")
    for block in PAGE.blocks("python"):
        exec(block, vars(module))  # noqa: S102 -- the page's own code
    monkeypatch.setitem(__import__("sys").modules, "my_jobs", module)
    return vars(module)


async def test_its_middleware_is_around_its_processors(
    settings: Settings, client: JobClient, rows: Rows, names: dict[str, Any]
) -> None:
    once: Any = names["ConvertOnce"]

    class Unlucky(once):
        async def process(self, job: Any) -> float:
            raise KeyError({100.0: "XXX"}[job.payload["cents"]])

    processors = [names["Convert"](names["Rates"]()), Unlucky(names["Rates"]())]
    async with Worker(processors, settings, middleware=[names["timed"]]):
        job = await client.enqueue("convert", {"cents": 100})
        assert (await rows.becomes(job.id, "completed"))["result"] == 105.0
        unlucky = await client.enqueue("unlucky", {"cents": 100})
        assert (await rows.becomes(unlucky.id, "failed"))["last_error"] == "unknown currency XXX"
    assert names["seconds"].keys() == {"convert", "unlucky"}


@pytest.mark.parametrize("target", re.findall(r"jsworker run \"?(my_jobs:[\w()]+)", PAGE.text))
def test_its_targets_are_processors(target: str, names: dict[str, Any]) -> None:
    names["Other"] = type("Other", (names["Convert"],), {"__init__": object.__init__})
    assert load_processor(target).kind in {"convert", "other"}
