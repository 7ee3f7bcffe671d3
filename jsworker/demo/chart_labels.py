"""Where the words of a chart go and how they fit: no two labels over each other, no text past its room."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

_FONT = "DejaVu Sans"
_ELLIPSIS = "…"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart as little as a simple pass allows.

    Args:
        wanted: where each label would like to stand, ascending.
        gap: the least distance between neighbours.
        low: no position is below it.
        high: no position is above it, as long as all fit in.
    """
    places: list[float] = []
    for position in wanted:
        places.append(max(position, places[-1] + gap) if places else max(position, low))
    ceiling = high
    for index in reversed(range(len(places))):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - gap
    return places


def fitted(text: str, *, width: float, size: float, weight: str) -> str:
    """Return a text that fits, its middle left out when it is too wide, glyphs that the font lacks as boxes.

    Args:
        text: any text.
        width: the room in points.
        size: the font's size in points.
        weight: the font's weight, ``normal`` or ``bold``.
    """
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415 -- only a chart should cost the import
    from matplotlib.textpath import TextPath  # noqa: PLC0415 -- the same

    font = FontProperties(family=_FONT, weight=weight)

    def fits(candidate: str) -> bool:
        return float(TextPath((0, 0), candidate, size=size, prop=font).get_extents().width) <= width

    whole = _with_known_glyphs(text, font)
    if fits(whole):
        return whole
    kept = max(2, len(whole) - 1)
    while kept > 2 and not fits(_without_middle(whole, kept)):
        kept -= 1 + kept // 20
    return _without_middle(whole, kept)


def _without_middle(text: str, kept: int) -> str:
    head = (kept + 1) // 2
    return f"{text[:head]}{_ELLIPSIS}{text[len(text) - kept // 2 :]}"


def _with_known_glyphs(text: str, font: "FontProperties") -> str:
    from matplotlib.font_manager import findfont, get_font  # noqa: PLC0415 -- only a chart should cost the import

    face = get_font(findfont(font))
    return "".join(letter if face.get_char_index(ord(letter)) else "□" for letter in text)
