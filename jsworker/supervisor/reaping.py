"""Burying strangers: process 1 of a container inherits every process whose own parent has gone."""

import os
from collections.abc import Container
from contextlib import suppress


def reap_orphans(known: Container[int]) -> None:
    """Reap dead children, but leave the known ones to those who wait for them.

    A known one that is dead hides the strangers behind it: reap those that are known first.
    """
    with suppress(ChildProcessError):  # there are none
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in known:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
