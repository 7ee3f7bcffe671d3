from typing import Any
from xml.etree import ElementTree as ET

import pytest

from jsworker.dashboard.workflow_picture import MOST_DRAWN, workflow_picture


def node(name: str, *needs: str, outcome: str | None = None, **jobs: int) -> dict[str, Any]:
    return {"name": name, "kind": "send-mail", "needs": list(needs), "outcome": outcome, "jobs": jobs}


def places(nodes: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    tree = ET.fromstring(workflow_picture(nodes, {}))  # noqa: S314 -- our own
    found = {}
    for group in tree.iter("g"):
        box, name = group.find("rect"), group.find("text")
        assert box is not None
        assert name is not None
        found[name.text or ""] = float(box.get("x", "0")), float(box.get("y", "0"))
    return found


def test_each_node_stands_right_of_what_it_needs() -> None:
    nodes = [
        node("fetch", outcome="completed", completed=1),
        node("left", "fetch", completed=3, failed=1, queued=6),
        node("right", "fetch", processing=1),
        node("both", "left", "right", "fetch", held=1),
    ]
    found = places(nodes)
    assert found["fetch"][0] < found["left"][0] == found["right"][0] < found["both"][0]
    assert len(set(found.values())) == 4


def test_shows_progress_and_links() -> None:
    picture = workflow_picture([node("left", completed=3, failed=1, queued=6)], {"left": "/jobs?batch=7&x=y"})
    tree = ET.fromstring(picture)  # noqa: S314 -- our own
    [link] = tree.iter("a")
    assert link.get("href") == "/jobs?batch=7&x=y"
    words = "".join(link.itertext())
    assert "left (send-mail): not finished; 3 completed, 1 failed, 6 queued" in words
    assert "3 of 10, 1 failed" in words
    parts = [
        float(each.get("width", "0"))
        for each in tree.iter("rect")
        if "workflow-part" in each.get("class", "")
    ]
    assert parts == pytest.approx([0.3 * 166, 0.1 * 166, 0.6 * 166], abs=0.1)


def test_escapes_names() -> None:
    evil = '"><script>alert(1)</script>'
    picture = workflow_picture([node(evil, completed=1)], {evil: evil})
    assert "<script" not in picture
    ET.fromstring(picture)  # noqa: S314 -- our own


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [node("a", "b"), node("b", "a")],
        [node("a", "gone")],
        [node(str(n)) for n in range(MOST_DRAWN + 1)],
    ],
)
def test_what_cannot_be_drawn_is_left_to_the_table(nodes: list[dict[str, Any]]) -> None:
    assert workflow_picture(nodes, {}) == ""
