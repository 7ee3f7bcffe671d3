"""Named points of a job's way at which the fault suite injects faults. In production none is installed."""

from collections.abc import Awaitable, Callable

FAULT_POINTS = frozenset(
    {
        "after_commit_before_publish",
        "after_publish_before_mark",
        "after_claim_before_run",
        "after_process_before_settle",
        "after_settle_before_ack",
        "after_reset_before_wake",
    }
)

Strike = Callable[[], Awaitable[None]]

_installed: dict[str, Strike] = {}


def install(name: str, strike: Strike) -> None:
    """Await ``strike`` whenever the process passes the point ``name``."""
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} must be one of: {', '.join(sorted(FAULT_POINTS))}")
    _installed[name] = strike


def armed() -> bool:
    """Return whether any strike is installed; a hot path need not await otherwise."""
    return bool(_installed)


async def reach(name: str) -> None:
    """Pass the point ``name`` and await the strike that is installed there."""
    if (strike := _installed.get(name)) is not None:
        await strike()
