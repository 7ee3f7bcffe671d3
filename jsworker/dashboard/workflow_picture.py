"""The graph of a workflow as layered SVG: a node is right of all nodes that it needs, with its progress."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from jsworker.core.names import printable
from jsworker.dashboard.charts import rect, text, titled

MOST_DRAWN: Final = 150
"""Most nodes of a graph that is drawn; a larger one is shown only as a table."""

_STATUSES: Final = ("completed", "failed", "cancelled", "processing", "queued", "scheduled", "held")
"""In the order of the parts of a node's bar."""
_WIDTH, _HEIGHT = 190, 64
_GAP_X, _GAP_Y = 60, 22
_MARGIN: Final = 12
_LONGEST_NAME: Final = 21


def workflow_picture(nodes: Sequence[Mapping[str, Any]], links: Mapping[str, str]) -> Markup:
    """Return the graph of the nodes of ``Workflows.get``, empty if it cannot be drawn.

    ``links`` are the addresses of nodes, by their names.
    """
    if not 0 < len(nodes) <= MOST_DRAWN:
        return Markup("")
    layers = _layers(nodes)
    if layers is None:
        return Markup("")
    places = {
        (name, column): (_MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y))
        for column, layer in enumerate(layers)
        for row, name in enumerate(layer)
    }
    columns = dict(sorted(places, key=lambda place: -place[1]))  # each node is drawn in its first column
    width = 2 * _MARGIN + len(layers) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + max(map(len, layers)) * (_HEIGHT + _GAP_Y) - _GAP_Y
    finished = {node["name"] for node in nodes if node["outcome"] is not None}
    arrows = []
    for node in nodes:
        end = columns[node["name"]]
        for need in node["needs"]:
            way = [places[need, column] for column in range(columns[need], end)]
            arrows.append(_arrow([*way, places[node["name"], end]], is_done=need in finished))
    boxes = [
        _node(node, *places[node["name"], columns[node["name"]]], links.get(node["name"])) for node in nodes
    ]
    svg = Markup(
        '<svg class="workflow" viewBox="0 0 {} {}" width="{}" height="{}"><title>{}</title>{}{}</svg>'
    ).format(
        width, height, width, height, "Graph of the workflow", Markup("").join(arrows), Markup("").join(boxes)
    )
    return Markup(
        '<div class="workflow-scroll" role="region" tabindex="0" aria-label="Graph of the workflow">{}</div>'
    ).format(svg)


def in_words(jobs: Mapping[str, int]) -> str:
    """Return how many jobs of a node there are by status: ``3 completed, 1 failed``."""
    known = [status for status in _STATUSES if jobs.get(status)]
    return ", ".join(f"{jobs[status]:,} {status}" for status in known) or "no jobs"


def _layers(nodes: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the names of nodes column by column; None: a need is missing, or there is a cycle.

    A node that is needed more than one column away also has a place in the columns between, for its arrows.
    """
    depth: dict[str, int] = {}
    left = list(nodes)
    while left:
        ready = [node for node in left if all(need in depth for need in node["needs"])]
        if not ready:
            return None
        for node in ready:
            depth[node["name"]] = 1 + max((depth[need] for need in node["needs"]), default=-1)
        left = [node for node in left if node["name"] not in depth]
    until = dict(depth)
    for node in nodes:
        for need in node["needs"]:
            until[need] = max(until[need], depth[node["name"]] - 1)
    needs = {node["name"]: node["needs"] for node in nodes}
    found: list[list[str]] = []
    row: dict[str, float] = {}
    for column in range(max(depth.values()) + 1):
        layer = [name for name in depth if depth[name] <= column <= until[name]]
        # Sorted by the average row of its needs, or by its own row in the column before: few arrows cross.
        middle = {
            name: row[name]
            if name in row
            else sum(row[need] for need in needs[name]) / max(len(needs[name]), 1)
            for name in layer
        }
        layer.sort(key=lambda name, middle=middle: middle[name])  # type: ignore[misc] # a default is no parameter
        row = {**row, **{name: float(place) for place, name in enumerate(layer)}}
        found.append(layer)
    return found


def _arrow(way: Sequence[tuple[float, float]], *, is_done: bool) -> Markup:
    """Return the arrow from the first place to the last one, straight through those between."""
    parts: list[str] = []
    for (x1, y1), (x2, y2) in pairwise(way):
        start, end, middle = x1 + _WIDTH, x2, x1 + _WIDTH + _GAP_X / 2
        parts.append(f"M{x1 + _WIDTH:.0f} {y1 + _HEIGHT / 2:.0f}" if not parts else f"H{start:.0f}")
        parts.append(f"C{middle:.0f} {y1 + _HEIGHT / 2:.0f} {middle:.0f} {y2 + _HEIGHT / 2:.0f}")
        parts.append(f"{end:.0f} {y2 + _HEIGHT / 2:.0f}")
    look = " workflow-done" if is_done else ""
    return Markup('<path class="workflow-arrow{}" d="{}m-7-4l7 4l-7 4"/>').format(look, " ".join(parts))


def _node(node: Mapping[str, Any], x: float, y: float, link: str | None) -> Markup:
    jobs: Mapping[str, int] = node["jobs"]
    every = sum(jobs.values())
    name = printable(str(node["name"]), 255)
    look = node["outcome"] or next(
        (each for each in ("processing", "queued", "held") if jobs.get(each)), "plain"
    )
    parts = [
        rect(f"workflow-box look-{look}", x, y, _WIDTH, _HEIGHT, rounded=8),
        text("workflow-name", x + 12, y + 21, printable(name, _LONGEST_NAME)),
        text("workflow-count", x + 12, y + 38, _progress(jobs, every)),
    ]
    left = x + 12.0
    room = _WIDTH - 24
    parts.append(rect("workflow-track", left, y + 47, room, 6))
    for status in _STATUSES:
        share = room * jobs.get(status, 0) / every if every else 0
        if share:
            parts.append(rect(f"workflow-part look-{status}", left, y + 47, share, 6))
            left += share
    words = f"{name} ({node['kind']}): {node['outcome'] or 'not finished'}; {in_words(jobs)}"
    box = titled(words, *parts)
    if link is None:
        return box
    return Markup('<a href="{}">{}</a>').format(link, box)


def _progress(jobs: Mapping[str, int], every: int) -> str:
    if every == 1:
        return next(status for status in _STATUSES if jobs.get(status)) if in_words(jobs) != "no jobs" else ""
    failed = f", {jobs['failed']:,} failed" if jobs.get("failed") else ""
    return f"{jobs.get('completed', 0):,} of {every:,}{failed}"
