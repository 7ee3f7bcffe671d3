"""The names of events are what the code emits, all of it and nothing else."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import jsworker
from jsworker.core.events import EVENT_NAMES, EventName

SOURCES = Path(jsworker.__file__).parent


def emitted(tree: ast.AST) -> Iterator[str]:
    """Yield the names that calls of ``emit`` are given, by ``partial`` too, in both arms of a choice."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for function, name in pairwise([node.func, *node.args]):
                if isinstance(function, ast.Attribute) and function.attr == "emit":
                    yield from (str(each.value) for each in ast.walk(name) if isinstance(each, ast.Constant))


def test_the_literal_is_what_is_emitted() -> None:
    found = {name for path in SOURCES.rglob("*.py") for name in emitted(ast.parse(path.read_text()))}
    assert found == set(get_args(EventName)) == EVENT_NAMES
