"""The examples show what users can do: they import nothing of jsworker but the public names."""

import ast
from pathlib import Path

import pytest

import jsworker

EXAMPLES = Path(__file__).parents[2] / "examples"
DOORS = {
    "jsworker": set(jsworker.__all__),
    "jsworker.dashboard": {"dashboard"},
    "jsworker.embedded": {"EmbeddedServers"},
    "jsworker.contrib.fastapi": {"Client", "jobs_lifespan"},
    "jsworker.contrib.django": {"enqueue"},
    "jsworker.contrib.django.admin": {"job_link"},
}
FILES = sorted(EXAMPLES.rglob("*.py"))
USED = {
    "code_evolution": {"JobProcessor", "JobClient", "Worker", "EmbeddedServers"},
    "pipeline": {"JobProcessor", "JobClient", "Worker", "Cron", "Limit", "Rate", "EmbeddedServers"},
}


def imports(file: Path) -> set[tuple[str, str]]:
    """Return the modules of jsworker that a file imports from, each with the imported name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "jsworker"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_only_public_names_are_imported(file: Path) -> None:
    assert {(module, name) for module, name in imports(file) if name not in DOORS.get(module, ())} == set()


@pytest.mark.parametrize("example", USED)
def test_the_public_names_are_used(example: str) -> None:
    names = {name for file in FILES if file.parent.name == example for _, name in imports(file)}
    assert names >= USED[example]
