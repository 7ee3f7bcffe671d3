"""Other processes, each of which may end at any moment."""

import os
from contextlib import suppress
from pathlib import Path

import psutil


def has_ended(pid: int) -> bool:
    """Tell whether there is no such process, or only its exit status is left."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_of(*folders: Path) -> list[psutil.Process]:
    """Processes that name one of the folders in their command line, work in it or have a file of it open.

    This process is left out.
    """
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(str(folder) in _traces(process) for folder in folders)
    ]


def _traces(process: psutil.Process) -> str:
    traces: list[str] = []
    with suppress(psutil.Error, OSError):  # ended meanwhile, or of another user
        traces += [*process.cmdline(), process.cwd()]
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                traces.append(str(descriptor.readlink()))
    return "\n".join(traces)
