"""``demo`` hands its options on, and says what to install when something is missing."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .commands import Cli


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Path], dict[str, Any]]]:
    """What the demo is asked for; it is not run, which takes a minute."""
    found: list[tuple[list[Path], dict[str, Any]]] = []

    def run_demo(repositories: list[Path], **options: Any) -> int:
        found.append((repositories, options))
        return 1

    command = ModuleType("jsworker.demo.command")
    command.run_demo = run_demo  # type: ignore[attr-defined]  # what the real module has
    monkeypatch.setitem(sys.modules, "jsworker.demo.command", command)
    return found


def test_options_and_exit_code_are_handed_on(
    cli: Cli, calls: list[tuple[list[Path], dict[str, Any]]]
) -> None:
    assert cli("demo").code == 1
    assert cli("demo", "a", "b.git", "--no-kill", "--json", "--data", "d", "--out", "o").code == 1
    assert calls == [
        ([], {"kill": True, "json_output": False, "data": None, "out": None}),
        (
            [Path("a"), Path("b.git")],
            {"kill": False, "json_output": True, "data": Path("d"), "out": Path("o")},
        ),
    ]


def test_a_missing_package_is_named_with_its_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotInstalled:
        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> None:
            if name == "jsworker.demo.command":
                raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.delitem(sys.modules, "jsworker.demo.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    line = cli("demo").refused(1)
    assert line == "the demo needs the package matplotlib: pip install 'jsworker[demo]'"
