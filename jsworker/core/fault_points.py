"""Named points on a job's way, from enqueueing to its end, at which tests inject faults.

In production no fault is installed.
"""

from collections.abc import Awaitable, Callable
from uuid import UUID

Strike = Callable[[], Awaitable[None]]

_installed: dict[str, Strike] = {}


def install(name: str, strike: Strike) -> None:
    """Await ``strike`` whenever the process passes the point ``name``."""
    _installed[name] = strike


def after_step(name: str) -> str:
    """Return the name of the point at which the step of this name has returned and is not kept yet."""
    return f"after_step_before_keep: {name}"


def after_process(job_id: UUID) -> str:
    """Return the name of the point at which this job's processor has returned and nothing is settled yet."""
    return f"after_process_before_settle: {job_id}"


def armed() -> bool:
    """Return whether any strike is installed; if not, a hot path need not await ``reach``."""
    return bool(_installed)


async def reach(name: str) -> None:
    """Pass the point ``name`` and await the strike that is installed there."""
    if (strike := _installed.get(name)) is not None:
        await strike()
