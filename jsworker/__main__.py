"""``python -m jsworker`` is the command ``jsworker``."""

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run ``jsworker`` with the arguments of this process; ``run`` ends at SIGTERM from here on.

    The supervisor has a handler of its own, but not before all is imported, and a signal without a handler
    does not reach process 1 of a container. Ctrl-C ends a command without a traceback at any time.
    """
    if sys.argv[1:2] == ["run"]:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        from jsworker.cli.app import main as run_command_line  # noqa: PLC0415 -- behind the handler
    except KeyboardInterrupt:
        os._exit(130)  # at once: another Ctrl-C could still print a traceback

    run_command_line()


if __name__ == "__main__":
    main()
