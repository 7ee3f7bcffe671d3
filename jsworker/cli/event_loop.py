"""The event loop on which a worker process of `jsworker run` works."""

import asyncio
from collections.abc import Callable

from jsworker.core.errors import SettingsError


def loop_factory(wanted: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop; None: asyncio's own.

    Args:
        wanted: ``auto`` (uvloop where it is installed), ``asyncio`` or ``uvloop``.

    Raises:
        SettingsError: uvloop is wanted and not installed.
    """
    if wanted == "asyncio":
        return None
    try:
        import uvloop  # noqa: PLC0415 -- an extra, and supervisors never need it
    except ImportError as error:
        if wanted == "auto":
            return None
        raise SettingsError(
            f"JSWORKER_EVENT_LOOP='{wanted}' cannot be used: {error};"
            " install it: pip install 'jsworker[uvloop]'"
        ) from None
    return uvloop.new_event_loop
