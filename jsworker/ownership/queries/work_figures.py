"""The work of the last minutes or hours, from the figures that workers record."""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from typing import Final

from sqlalchemy import text

from jsworker.core.clock import DURATION_BUCKETS
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.statistics import COUNTED, KindFigures

_SUMS: Final = ", ".join(f"CAST(sum({name}) AS bigint) AS {name}" for name in COUNTED)
_SECONDS: Final = "sum(wait_seconds) AS wait_seconds, sum(run_seconds) AS run_seconds"
_PLACES: Final = range(1, len(DURATION_BUCKETS) + 2)


def _places(name: str) -> str:
    return ", ".join(f"coalesce(CAST(sum({name}[{place}]) AS bigint), 0)" for place in _PLACES)


# Each element of the arrays is summed by itself: unnest would make a row of each, and all would be sorted.
FIGURES_BY_MINUTE = text(f"""
SELECT minute, {_SUMS}, {_SECONDS}, ARRAY[{_places("waits")}] AS waits, ARRAY[{_places("runs")}] AS runs
FROM jsworker.statistics
WHERE minute >= date_trunc('minute', statement_timestamp()) - make_interval(mins => CAST(:minutes AS integer))
GROUP BY minute ORDER BY minute""")  # noqa: S608 -- constants


async def figures_by_minute(database: Database, *, minutes: int = 60) -> dict[datetime, KindFigures]:
    """Return the figures of each of the last minutes with any work; those of the present one are partial."""
    rows = await database.run(FIGURES_BY_MINUTE, {"minutes": minutes})
    return {row[0]: KindFigures(*row[1:]) for row in rows}


def percentile(buckets: Sequence[int], share: float) -> float | None:
    """Return below which duration, in seconds, such a share (0 to 1) of what was counted lies; None: nothing was.

    Within a bucket it is estimated; beyond the last bound it is that bound.
    """
    sums = list(accumulate(buckets))
    if not sums or not sums[-1]:
        return None
    wanted = share * sums[-1]
    place = bisect_left(sums, wanted)
    if place >= len(DURATION_BUCKETS):
        return DURATION_BUCKETS[-1]
    low, high = (DURATION_BUCKETS[place - 1] if place else 0.0), DURATION_BUCKETS[place]
    before = sums[place - 1] if place else 0
    return low + (high - low) * (wanted - before) / max(buckets[place], 1)
