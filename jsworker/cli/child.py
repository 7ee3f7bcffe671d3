"""``python -m jsworker.cli.child``: one worker process of ``jsworker run``, which alone starts it."""

import gc
import sys
from typing import NoReturn

from jsworker.cli.process_exit import LEAVE_SECONDS, leave_within
from jsworker.supervisor.child_start import ChildStart, start_as_child


def main() -> NoReturn:
    """Work on the targets among the arguments until the parent says stop, or is dead."""
    start, targets = ChildStart.read(sys.argv[1:])
    start_as_child(start.parent)
    # Behind the first steps, because it takes most of a second; with the garbage collector on, which finds
    # nothing in it, a fifth longer.
    gc.disable()
    from jsworker.cli import lean_structlog  # noqa: F401, PLC0415 -- before anybody else imports structlog
    from jsworker.cli.work import work  # noqa: PLC0415 -- see above

    gc.freeze()
    gc.enable()
    # A job may print what this terminal's encoding does not hold.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stream here
    code = work(targets, start)
    leave_within(LEAVE_SECONDS, code)
    sys.exit(code)


if __name__ == "__main__":
    main()
