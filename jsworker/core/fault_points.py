"""Named places in the main way at which a fault suite can strike. In production nothing is installed."""

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
    """Await ``strike`` whenever the process passes the point ``name``.

    Raises:
        ValueError: there is no such point.
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} must be one of: {', '.join(sorted(FAULT_POINTS))}")
    _installed[name] = strike


def clear() -> None:
    """Take all strikes away."""
    _installed.clear()


def armed() -> bool:
    """Tell whether any strike is installed, so that a hot path need not await for nothing."""
    return bool(_installed)


async def reach(name: str) -> None:
    """Pass the point ``name``: a strike that is installed there happens now."""
    if (strike := _installed.get(name)) is not None:
        await strike()
