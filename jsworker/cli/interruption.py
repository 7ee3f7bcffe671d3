"""Ctrl-C in a command that writes batch after batch: the present one is finished, so that it is counted."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from jsworker.cli.output import remark


def run_in_batches(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that raises CancelledError when it was interrupted.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    try:
        asyncio.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def on_interrupt(says: str) -> asyncio.Event:
    """Return an event that Ctrl-C sets, after a remark; a second Ctrl-C cancels the present task at once."""
    interrupted, task = asyncio.Event(), asyncio.current_task()

    def interrupt() -> None:
        if interrupted.is_set() and task is not None:
            task.cancel()
        elif not interrupted.is_set():
            remark(f"stopping after this batch; {says}")
        interrupted.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    return interrupted
