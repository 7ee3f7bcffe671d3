"""``python -m jsworker.supervisor.child_main``: one worker process, started by ``jsworker run`` alone."""

import gc
import sys
from typing import NoReturn

from jsworker.core.garbage import collect_less_often
from jsworker.supervisor.child_start import ChildStart, start_as_child
from jsworker.supervisor.process_exit import EXIT_SECONDS, exit_within


def main() -> NoReturn:
    """Work on the targets among the arguments until the parent requests a stop, or is dead."""
    start, targets = ChildStart.read(sys.argv[1:])
    start_as_child(start)
    # Behind the first steps, because it takes most of a second; with the garbage collector on, which finds
    # nothing in it, a fifth longer.
    gc.disable()
    from jsworker.telemetry import lean_structlog  # noqa: F401, I001, PLC0415 -- before all other imports of structlog
    from jsworker.stream import lean_nats  # noqa: F401, PLC0415 -- before all other imports of nats-py
    from jsworker.supervisor.child_worker import work  # noqa: PLC0415 -- see above

    gc.freeze()
    collect_less_often()
    gc.enable()
    # A job may print what this terminal's encoding does not hold.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stream here
    code = work(targets, start)
    exit_within(EXIT_SECONDS, code)
    sys.exit(code)


if __name__ == "__main__":
    main()
