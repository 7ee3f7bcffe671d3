"""Draws the packages into docs/architecture.svg and lists them in docs/architecture.md, from their imports.

python -m tests.packaging.document_architecture docs/architecture.md
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from statistics import mean

import grimp

ROOMS_WITH_PARTS = ("worker", "ownership")
"""Packages that are listed with their parts."""
SERVERS = {"psycopg": "PostgreSQL", "nats": "NATS"}
"""The driver that a room imports, and the server at its other end."""
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"

_WIDTH = 640
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
text {{ font: 15px system-ui, sans-serif; text-anchor: middle; fill: #1d2733; }}
path {{ stroke: #5b6776; stroke-width: 1.4; marker-end: url(#tip); }}
.package {{ fill: #e8ecfb; stroke: #3f51b5; }}
.server {{ fill: #fdf3dc; stroke: #a06a00; }}
</style>
<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0 0L9 4L0 8z" style="stroke: none; fill: #5b6776"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>"""

Arrows = dict[str, set[str]]


def page_with_packages(page: str) -> str:
    """Return the page with its picture and its table of packages made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    graph = _graph()
    lines = ["![The packages, and which of them import which](architecture.svg)", ""]
    lines += ["| package | what it is for |", "|---|---|"]
    for room in sorted(_imports_of_rooms(graph)):
        lines.append(f"| `{room}` | {_purpose(f'jsworker.{room}')} |")
        for part in sorted(_parts(graph, room)):
            lines.append(f"| `{room}/{part}` | {_purpose(f'jsworker.{room}.{part}')} |")
    return "\n".join([f"{before}{BEGIN}", *lines, "", f"{END}{after}"])


def picture() -> str:
    """Return the packages as SVG: an arrow from each to those that it imports, which stand below it."""
    graph = _graph()
    arrows = _direct(_imports_of_rooms(graph))
    for driver, server in SERVERS.items():
        arrows[server] = set()
        for name in graph.find_modules_that_directly_import(driver):
            arrows[_room(name)].add(server)
    rows = _rows(arrows)
    places = {
        room: (round(_WIDTH * (2 * number + 1) / (2 * len(row))), 40 + 80 * height)
        for height, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    lines = [_SVG.format(width=_WIDTH, height=80 * len(rows))]
    for room, others in sorted(arrows.items()):
        for other in sorted(others):
            (x, y), (to_x, to_y) = places[room], places[other]
            lines.append(f'<path d="M{x} {y + 18}L{to_x} {to_y - 20}"/>')
    for room, (x, y) in sorted(places.items()):
        kind = "server" if room in SERVERS.values() else "package"
        lines.append(f'<rect class="{kind}" x="{x - 62}" y="{y - 18}" width="124" height="36" rx="5"/>')
        lines.append(f'<text x="{x}" y="{y + 5}">{room}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _rows(arrows: Mapping[str, AbstractSet[str]]) -> list[list[str]]:
    """Return the packages from the top down, each above what it imports, in an order with few crossings."""

    def height(room: str) -> int:
        return max((1 + height(other) for other in arrows[room]), default=0)

    heights = {room: height(room) for room in sorted(arrows)}
    rows = [[room for room in heights if heights[room] == each] for each in range(max(heights.values()) + 1)]
    place = {room: (number + 0.5) / len(row) for row in rows for number, room in enumerate(row)}
    for sweep in range(8):
        for row in rows if sweep % 2 else rows[::-1]:
            near = {room: arrows[room] if sweep % 2 else _importers(arrows, room) for room in row}
            row.sort(key=lambda room: mean([place[each] for each in near[room]] or [place[room]]))
            place |= {room: (number + 0.5) / len(row) for number, room in enumerate(row)}
    return rows[::-1]


def _importers(arrows: Mapping[str, AbstractSet[str]], room: str) -> list[str]:
    return [other for other, imported in arrows.items() if room in imported]


def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("jsworker", include_external_packages=True, exclude_type_checking_imports=True)


def _purpose(package: str) -> str:
    """Return the first sentence of a package's docstring."""
    text = importlib.import_module(package).__doc__ or ""
    return text.strip().splitlines()[0].rstrip(".").replace("``", "").replace('"', "'")


def _parts(graph: grimp.ImportGraph, room: str) -> set[str]:
    if room not in ROOMS_WITH_PARTS:
        return set()
    children = graph.find_children(f"jsworker.{room}")
    return {name.rpartition(".")[2] for name in children if graph.find_children(name)}


def _imports_of_rooms(graph: grimp.ImportGraph) -> Arrows:
    arrows: Arrows = defaultdict(set)
    for module in graph.modules:
        room = _room(module)
        if not room:
            continue
        arrows[room] |= set()
        for imported in graph.find_modules_directly_imported_by(module):
            other = _room(imported)
            if other and other != room:
                arrows[room].add(other)
    return arrows


def _room(module: str) -> str:
    """Return the room that a module lies in; empty for the top level and for other packages."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    return room if package == "jsworker" and not room.startswith("_") else ""


def _direct(arrows: Mapping[str, AbstractSet[str]]) -> Arrows:
    """Leave out an arrow where another way leads to the same room."""
    return {
        room: {
            other
            for other in others
            if not any(other in _reached(arrows, between) for between in others if between != other)
        }
        for room, others in arrows.items()
    }


def _reached(arrows: Mapping[str, AbstractSet[str]], room: str) -> set[str]:
    found: set[str] = set()
    todo = [room]
    while todo:
        new = set(arrows[todo.pop()]) - found
        found |= new
        todo += new
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page_with_packages(path.read_text()))
    path.with_suffix(".svg").write_text(picture())
