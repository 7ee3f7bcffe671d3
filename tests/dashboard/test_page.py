"""docs/dashboard.md: its code works, and it names what there is."""

import re
from typing import Any

import httpx
import pytest

from jsworker.dashboard import ACTIONS
from jsworker.dashboard.app import PAGES
from tests.support.documents import Page

PAGE = Page("docs/dashboard.md")


@pytest.fixture
def names(environment: None) -> dict[str, Any]:
    """What the code of the page defines, with the servers of the test."""
    return PAGE.names()


async def test_it_is_mounted_where_the_page_says(names: dict[str, Any]) -> None:
    async def django(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope["path"])

    async with names["client"]:
        for app in (names["app"], names["with_dashboard"](django)):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://a.test") as http:
                assert (await http.get("/ops/jobs/")).status_code == 403
                page = await http.get("/ops/jobs/", headers={"x-user": "ann"})
                assert page.status_code == 200
                assert 'href="/ops/jobs/jobs"' in page.text


def test_it_names_actions_and_pages() -> None:
    [listed] = re.findall(r"(?s)The actions are (.*?)\.", PAGE.text)
    assert set(re.findall(r"`([\w-]+)`", listed)) == ACTIONS
    titles = {page.title for page in PAGES if page.title}
    assert titles <= set(re.findall(r"(?m)^\| (\w[\w ]*?) \|", PAGE.text))
