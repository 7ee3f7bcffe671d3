"""One worker process: counts lines until SIGTERM arrives or the demo is gone, however the demo ended."""

import asyncio
import logging
import signal
import sys

from code_evolution.jobs import CountLines
from jsworker import JsworkerError, Worker, load_settings

logger = logging.getLogger("code_evolution")


async def work() -> None:
    """Run a worker with the settings of the environment; its id is printed once it has started."""
    worker = Worker([CountLines], load_settings())
    worker.on("*", lambda event: logger.info("%s %s", event.name, event.fields))
    worker.on("worker.started", lambda _: print(worker.id, flush=True))  # noqa: T201 -- for the demo to read
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stop)

    def demo_is_gone() -> None:
        loop.remove_reader(sys.stdin)
        worker.stop(force=True)

    # Nothing is ever written to stdin; its other end is closed when the demo ends, on every system.
    loop.add_reader(sys.stdin, demo_is_gone)
    await worker.run()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    try:
        asyncio.run(work())
    except JsworkerError as error:
        sys.exit(str(error))
