"""Links of a page that lead out of docs/: to the repository, to another page, or nowhere."""

import logging
import re
import runpy
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import DOCS

HOOKS = runpy.run_path(str(DOCS / "hooks.py"))
REPOSITORY = "https://example.org/jsworker"


def rewritten(markdown: str, *, page: str = "reference/jobs.md", repository: str = REPOSITORY) -> Any:
    of_page = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    config = SimpleNamespace(extra={"repository": repository})
    return HOOKS["on_page_markdown"](markdown, page=of_page, config=config, files=None)


@pytest.mark.parametrize(
    ("link", "result"),
    [
        ("[a](../../model)", f"[a]({REPOSITORY}/blob/HEAD/model)"),
        ("[a](../../README.md#top)", f"[a]({REPOSITORY}/blob/HEAD/README.md#top)"),
        ("[a](../../SECURITY.md#threats)", "[a](../security.md#threats)"),
        ("[a](../sql.md#claim)", "[a](../sql.md#claim)"),
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("[a](#b)", "[a](#b)"),
        ("[`a`](../../model)", f"[`a`]({REPOSITORY}/blob/HEAD/model)"),
        ("`[a](../../model)`", "`[a](../../model)`"),
        ("```\n[a](../../model)\n```", "```\n[a](../../model)\n```"),
    ],
)
def test_a_link_leads_to_its_place(link: str, result: str) -> None:
    assert rewritten(f"See\n{link}\n.") == f"See\n{result}\n."


def test_links_also_lead_somewhere_where_the_markdown_itself_is_read() -> None:
    dead = []
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        prose = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`", "", page.read_text())
        targets = re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", prose)
        dead += [(page.name, each) for each in targets if not (page.parent / each).exists()]
    assert dead == []


def test_pages_from_the_top_lead_into_the_site() -> None:
    assert rewritten("[a](docs/sql.md)", page="changelog.md") == "[a](sql.md)"
    assert rewritten("[a](examples)", page="changelog.md") == f"[a]({REPOSITORY}/blob/HEAD/examples)"


def test_without_an_address_the_path_is_shown() -> None:
    assert rewritten("[the model](../../model)", repository="") == "the model (`model`)"
    assert rewritten("[model/](../../model)", repository="") == "model/"


def test_a_file_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):  # which ends a strict build
        rewritten("[a](../../gone.md)")
    assert "gone.md, which does not exist" in caplog.text
