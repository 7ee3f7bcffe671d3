"""The site as it is built: strictly, for its readers alone, and for programs that read."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from .conftest import DOCS

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Loads(HTMLParser):
    """Collects what a browser loads to show a page, and the links that it would follow."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "prev", "next"):
            return
        if tag in LOADED and (address := values.get(LOADED[tag])):
            self.loaded.add(address)


def test_a_reader_asks_nobody_else(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.loaded, page
        assert [address for address in loads.loaded if re.match(r"(https?:)?//", address)] == [], page
        # The theme loads the program that draws Mermaid's diagrams from elsewhere; without it they are text.
        assert 'class="mermaid"' not in page.read_text(), page
        assert "flowchart " not in page.read_text(), page
    for sheet in (*site.rglob("*.css"), *site.rglob("*.svg")):
        assert re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet


def test_the_theme_asks_no_host_for_stars(site: Path) -> None:
    assert "md-source" not in (site / "index.html").read_text()


def test_a_word_is_found(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("fencing token" in entry["text"] for entry in index["docs"])


def test_a_program_finds_every_page_as_markdown(site: Path) -> None:
    listed = re.findall(r"(?m)^- \[.+\]\((.+\.md)\)$", (site / "llms.txt").read_text())
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {"changelog.md", "security.md"}
    assert set(listed) == written
    assert len(listed) == len(written)
    for name in listed:
        copy = (site / name).read_text()
        assert copy.startswith("# "), name
        for target in re.findall(r"\]\(([^)#:]+\.md)", copy):
            assert (site / name).parent.joinpath(target).is_file(), (name, target)


def test_the_reference_shows_signatures_and_docstrings(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "client" / "index.html").read_text())
    assert "unique_key" in page
    assert "enqueue_many" in page
    assert "jsworker.core.errors" not in page
