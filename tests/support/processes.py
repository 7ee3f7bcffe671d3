"""Whether another process is still there, while it may end at any moment."""

import psutil


def has_ended(pid: int) -> bool:
    """Tell whether there is no such process, or only its exit status is left."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
