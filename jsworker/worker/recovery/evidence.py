"""Evidence of death: what this machine can prove about earlier lives of a worker (rule 2 of the protocol)."""

import os

from jsworker.ownership.transitions.workers import EarlierLife, WorkerRow
from jsworker.worker.identity import start_of


def death_of(earlier: EarlierLife, me: WorkerRow) -> str | None:
    """Return how an earlier life is proven to have ended, None when it may be alive.

    A name proves nothing: a pod of the same name may run on another node, and several workers may share a
    host. Proof is the process that is gone from this very PID namespace, or the end of the container that
    this one has replaced in its own pod.

    Args:
        earlier: the other worker, as the registry knows it.
        me: the worker that asks.
    """
    if me.boot_id is None or me.pid_namespace is None:
        return None
    if (earlier.boot_id, earlier.pid_namespace) == (me.boot_id, me.pid_namespace):
        return _end_of_process(earlier)
    same_container = (earlier.pod_uid, earlier.container) == (me.pod_uid, me.container)
    if same_container and me.pod_uid is not None and me.container is not None:
        return f"container {me.container} of this pod was started anew"
    return None


def _end_of_process(earlier: EarlierLife) -> str | None:
    started = start_of(earlier.pid)
    if started is not None and (earlier.process_started is None or started == earlier.process_started):
        return None
    if started is None and _is_hidden(earlier.pid):
        return None
    return f"process {earlier.pid} of this host is gone"


def _is_hidden(pid: int) -> bool:
    """Tell whether a process may be there that ``/proc`` does not show: mounted so, it hides other users'."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False  # one's own, which show: a zombie
