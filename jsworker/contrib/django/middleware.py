"""Django's database connections within a job: no old or broken one is used, and none is left open."""

import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections

from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor


class fresh_connections(AbstractAsyncContextManager[None], AbstractContextManager[None]):  # noqa: N801 -- used as a function
    """Middleware: give a job fresh connections, as Django does for a request, in the thread of its queries.

    A plain function runs in a thread of its own, whose connections are closed at its end. A coroutine's
    queries run in a thread that is used only by this job; its connections are closed when the job ends.
    """

    def __init__(self, job: Job[Any], processor: JobProcessor[Any]) -> None:
        self._thread = ThreadSensitiveContext()

    async def __aenter__(self) -> None:
        await self._thread.__aenter__()  # type: ignore[no-untyped-call] # asgiref's

    async def __aexit__(self, *error: object) -> None:
        try:
            await sync_to_async(_close_own)()
        finally:
            await self._thread.__aexit__(*error)  # type: ignore[no-untyped-call] # as above

    def __enter__(self) -> None:
        close_old_connections()

    def __exit__(self, *_: object) -> None:
        connections.close_all()


def _close_own() -> None:
    # The main thread runs the queries of an async test, whose transaction is open in a TestCase.
    keeps = threading.current_thread() is threading.main_thread()
    for each in connections.all(initialized_only=True):
        if not (keeps and each.in_atomic_block):
            each.close()
