"""One worker process of the demo: an ordinary worker that ends with the demo, however the demo ends."""

import asyncio
import signal
import sys

from jsworker.core.errors import JsworkerError, SettingsError
from jsworker.core.settings import load_settings
from jsworker.demo.processor import CountLines
from jsworker.telemetry.logs import configure_logs, log_events
from jsworker.worker.worker import Worker


async def work() -> None:
    """Count lines until SIGTERM arrives or the demo is gone.

    Raises:
        SettingsError: a setting in the environment is wrong.
        JsworkerError: the worker could not start, or one of its loops died.
    """
    settings = load_settings()
    configure_logs(format=settings.log_format, level=settings.log_level)
    worker = Worker([CountLines], settings)
    log_events(worker.events, worker_id=worker.id)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stop)

    def demo_is_gone() -> None:
        loop.remove_reader(sys.stdin)
        worker.stop(force=True)

    # Nothing is ever written there; the other end is closed by the demo's death, on every system.
    loop.add_reader(sys.stdin, demo_is_gone)
    await worker.run()


def main() -> int:
    """Run the worker and return its exit code: 0 stopped, 1 failed, 2 wrong settings."""
    try:
        asyncio.run(work())
    except JsworkerError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, SettingsError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
