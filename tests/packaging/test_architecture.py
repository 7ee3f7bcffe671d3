"""docs/architecture.md shows the rooms as they are, and names what exists."""

import re
from pathlib import Path

import pytest

from .document_architecture import page_with_packages, picture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
_FILE = re.compile(r"`((?:tests|[a-z]+)/[a-z_/]+\.py)`(?: ((?:`[A-Za-z_]+`(?:, )?)+))?")


def test_picture_and_table_are_current() -> None:
    command = "run python -m tests.packaging.document_architecture docs/architecture.md"
    assert page_with_packages(PAGE) == PAGE, command
    assert (ROOT / "docs" / "architecture.svg").read_text() == picture(), command


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


@pytest.mark.parametrize(("path", "names"), sorted(set(_FILE.findall(PAGE))))
def test_each_file_exists_and_defines_what_the_page_says(path: str, names: str) -> None:
    file = ROOT / path if path.startswith("tests/") else ROOT / "jsworker" / path
    source = file.read_text()
    for name in re.findall(r"`(\w+)`", names):
        assert re.search(rf"(?:class |def |^){name}\b", source, re.MULTILINE), f"{path} has no {name}"


def test_each_reset_rule_is_where_the_page_says() -> None:
    source = (ROOT / "jsworker/ownership/transitions/reset.py").read_text()
    rules = re.findall(r"`(RESET_\w+)`", PAGE)
    assert len(rules) == 4
    for rule in rules:
        assert re.search(rf"^{rule}\b", source, re.MULTILINE)
