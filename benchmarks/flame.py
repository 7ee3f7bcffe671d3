"""Draws a flame graph: ``python -m benchmarks.flame SAMPLES TITLE > FILE.svg``.

SAMPLES is the file that py-spy writes of a running worker, while jobs that do nothing flood it:
``py-spy record --pid PID --gil --rate 400 --duration 7 --format raw --output SAMPLES``.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

_WIDTH: Final = 1200
_ROW: Final = 19
_TOP: Final = 66
_MARGIN: Final = 10
_CHARACTER: Final = 6.6  # pixels, of this font
_LEAST_SHARE: Final = 0.002
_COLOURS: Final = {
    "jsworker": "#7fb3d5",
    "psycopg": "#a9d18e",
    "nats": "#f4b183",
    "pydantic": "#d5a6bd",
    "Python": "#d9d9d9",
}


@dataclass
class Frame:
    """A function within a call stack: its samples, with those of the functions it called, and these."""

    samples: int = 0
    calls: dict[str, "Frame"] = field(default_factory=dict)


def read_samples(text: str) -> Frame:
    """Return the root of all stacks; samples in different lines of a function are added up."""
    root = Frame()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frame = root
        frame.samples += int(count)
        for name in re.sub(r":\d+\)", ")", stack).split(";"):
            frame = frame.calls.setdefault(name, Frame())
            frame.samples += int(count)
    return root


def below_event_loop(root: Frame) -> Frame:
    """Return the frame of asyncio's ``Runner.run``, without its callers and without other threads.

    Raises ValueError: no stack has it.
    """
    pending = [root]
    while pending:
        for name, frame in pending.pop().calls.items():
            if name.startswith("Runner.run "):
                return frame
            pending.append(frame)
    raise ValueError("no stack has asyncio's Runner.run in it")


def draw(root: Frame, title: str) -> str:
    """Return the flame graph as SVG: a row for each depth, boxes as wide as their shares of all samples."""
    boxes = list(_boxes(root, 0.0, 0))
    height = _TOP + (1 + max((depth for depth, *_ in boxes), default=0)) * _ROW + _MARGIN
    legend = "".join(
        f'<rect x="{_MARGIN + 130 * place}" y="38" width="12" height="12" fill="{colour}"/>'
        f'<text x="{_MARGIN + 17 + 130 * place}" y="48">{name}</text>'
        for place, (name, colour) in enumerate(_COLOURS.items())
    )
    drawn = "".join(_box(*box, total=root.samples) for box in boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="monospace" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
        f'<text x="{_MARGIN}" y="24" font-size="15" font-family="sans-serif">{escape(title)}</text>'
        f"{legend}{drawn}</svg>\n"
    )


def _boxes(frame: Frame, start: float, depth: int) -> Iterator[tuple[int, float, str, Frame]]:
    for name, called in sorted(frame.calls.items(), key=lambda each: -each[1].samples):
        yield depth, start, name, called
        yield from _boxes(called, start, depth + 1)
        start += called.samples


def _box(depth: int, start: float, name: str, frame: Frame, *, total: int) -> str:
    scale = (_WIDTH - 2 * _MARGIN) / total
    width = frame.samples * scale
    if frame.samples / total < _LEAST_SHARE:
        return ""
    function, _, place = name.partition(" (")
    fits = int((width - 4) / _CHARACTER)
    label = function if len(function) <= fits else f"{function[: fits - 1]}…" if fits >= 4 else ""
    x, y = _MARGIN + start * scale, _TOP + depth * _ROW
    colour = next((colour for part, colour in _COLOURS.items() if part in place), _COLOURS["Python"])
    return (
        f'<g><title>{escape(name)}: {frame.samples / total:.1%}</title><rect x="{x:.1f}" y="{y}" '
        f'width="{width:.1f}" height="{_ROW - 1}" fill="{colour}" stroke="#ffffff" stroke-width="0.5"/>'
        f'<text x="{x + 3:.1f}" y="{y + 13}">{escape(label)}</text></g>'
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.flame SAMPLES TITLE > FILE.svg")
    samples, title = sys.argv[1:]
    sys.stdout.write(draw(below_event_loop(read_samples(Path(samples).read_text())), title))
