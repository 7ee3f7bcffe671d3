"""A supervisor without options: ``python -m tests.supervisor.bare_parent CONNECT_SECONDS COMMAND…``."""

import asyncio
import os
import sys

from jsworker.core.settings import Settings
from jsworker.supervisor.parent import Supervisor
from jsworker.telemetry.logs import configure_logs


async def supervise() -> tuple[int, str | None]:
    settings = Settings()  # without the rules of timing: intervals of milliseconds are allowed here
    patience, *command = sys.argv[1:]
    supervisor = Supervisor(
        settings, command=command, environment=dict(os.environ), connect_seconds=float(patience)
    )
    return await supervisor.run()


if __name__ == "__main__":
    configure_logs(format="json", level="info")
    code, words = asyncio.run(supervise())
    sys.stderr.write(f"{words}\n" if words else "")
    sys.exit(code)
