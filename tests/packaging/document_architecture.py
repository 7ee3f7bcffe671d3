"""Draws the rooms of the package into docs/architecture.md, from their imports.

python -m tests.packaging.document_architecture docs/architecture.md
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import grimp

ROOMS_WITH_PARTS = ("worker", "ownership")
"""Rooms that are drawn with their parts inside."""
SERVERS = {"psycopg": "PostgreSQL", "nats": "NATS"}
"""The driver that a room imports, and the server at its other end."""
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"

Arrows = dict[str, set[str]]


def page_with_picture(page: str) -> str:
    """Return the page with its picture drawn anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{picture()}{END}{after}"


def picture() -> str:
    """Return the rooms as a Mermaid flowchart: an arrow from each room to those that it imports."""
    graph = grimp.build_graph("jsworker", include_external_packages=True, exclude_type_checking_imports=True)
    imports = _imports_of_rooms(graph)
    lines = ["```mermaid", "flowchart TD"]
    lines += [_box(room, _parts(graph, room)) for room in sorted(imports)]
    lines += [f'  {server}[("{server}")]' for server in SERVERS.values()]
    for room, others in sorted(_direct(imports).items()):
        lines += [f"  {room} --> {other}" for other in sorted(others)]
    for driver, server in SERVERS.items():
        users = {_room(name) for name in graph.find_modules_that_directly_import(driver)} - {""}
        lines += [f"  {room} --> {server}" for room in sorted(users)]
    return "\n".join([*lines, "```", ""])


def _box(room: str, parts: AbstractSet[str]) -> str:
    label = [f"<b>{room}</b>", _purpose(f"jsworker.{room}")]
    label += [f"<i>{part}</i>: {_purpose(f'jsworker.{room}.{part}')}" for part in sorted(parts)]
    return f'  {room}["{"<br/>".join(label)}"]'


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
    path.write_text(page_with_picture(path.read_text()))
