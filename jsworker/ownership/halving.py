"""One bad row never fails its neighbours: a batch that PostgreSQL refuses is written in halves."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jsworker.ownership.pool import Row
from jsworker.ownership.refusals import RowRefused

T = TypeVar("T")

Refused = list[tuple[T, RowRefused]]
"""Members of a batch whose own row was refused, and why."""


async def in_halves(
    batch: Sequence[T], write: Callable[[Sequence[T]], Awaitable[Sequence[Row]]]
) -> tuple[list[Row], Refused[T]]:
    """Write a batch and find the members whose own row is refused by halving.

    Returns:
        The rows that ``write`` returned, and the refused members with the refusal of each.
    """
    if not batch:
        return [], []
    try:
        return list(await write(batch)), []
    except RowRefused as error:
        if len(batch) == 1:
            return [], [(batch[0], error)]
    middle = len(batch) // 2
    lower, refused_below = await in_halves(batch[:middle], write)
    upper, refused_above = await in_halves(batch[middle:], write)
    return lower + upper, refused_below + refused_above
