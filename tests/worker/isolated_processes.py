"""Finds the isolated processes of a worker."""

import psutil

from tests.support.polling import eventually


def children(parent: int | None = None) -> list[psutil.Process]:
    """Return the isolated processes of a worker process, by default of this one."""
    return [each for each in psutil.Process(parent).children() if _is_isolated(each)]


async def nothing_is_left() -> None:
    """Wait until this process has none."""

    async def none() -> None:
        assert children() == []

    await eventually(none)


def _is_isolated(process: psutil.Process) -> bool:
    try:
        return "jsworker.worker.isolation.isolated_child" in process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return False
