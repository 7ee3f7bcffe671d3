"""Every Python block of a page runs in a test."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Page

from .conftest import DOCS

BY_ANOTHER_TEST = {
    "index.md": "the README's first block, which tests/test_readme.py runs",
}
"""Pages whose blocks are run under another name, and which."""
GUIDES = {"start", "tutorial", "concepts", "migrate", "operate", "contributing"}
"""Folders of pages whose files and commands tests/docs runs, all of them alike."""

PAGES = sorted(page for page in DOCS.rglob("*.md") if re.search(r"(?m)^ *(```|~~~) *py", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_test_reads_the_page(page: Path) -> None:
    text, name = page.read_text(), str(page.relative_to(DOCS))
    found = len(re.findall(r"(?m)^ *(?:```|~~~) *py", text))
    blocks = Page(page).blocks("python")
    assert found == len(blocks), "a block that no test would find: not ```python, or indented"
    if name not in BY_ANOTHER_TEST and page.parent.name not in GUIDES:
        heads = {test: test.read_text().partition("\n")[0] for test in (ROOT / "tests").rglob("test_*.py")}
        tests = [test for test, head in heads.items() if f"docs/{name}" in head]
        assert tests, f"no test's first line names docs/{name}"
        assert any(re.search(r"python|\.names\(", test.read_text()) for test in tests)


def test_no_page_leaves_the_payloads_type_open_which_mypy_refuses_when_strict() -> None:
    bare = re.compile(r"\bjob: Job\b(?!\[)")
    assert [page.name for page in PAGES if any(map(bare.search, Page(page).blocks("python")))] == []


def test_the_first_example_is_the_readmes() -> None:
    [shown] = Page("docs/index.md").blocks("python")
    [tested] = Page("README.md").blocks("python")
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(tested))
