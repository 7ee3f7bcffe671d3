"""A JobClient for code that waits: on an event loop in a thread of its own, called from any other thread."""

import asyncio
import concurrent.futures
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from jsworker.client.job_client import JobClient
from jsworker.core.codec import Codec
from jsworker.core.contents import Contents
from jsworker.core.events import Event, Events
from jsworker.core.settings import Settings

T = TypeVar("T")
Call = Callable[[JobClient], Coroutine[Any, Any, T]]

_ON_A_LOOP: Final = (
    "SyncJobClient waits, which would hold up the event loop that runs in this thread: use JobClient and"
    " await it, or call this in another thread (asyncio.to_thread)"
)
_CLOSED: Final = "the client is closed"
_EXITING: Final = (
    "the interpreter is ending and has stopped the client's thread: call the client earlier, for example in a"
    " function that is registered with atexit"
)
_CUT_OFF: Final = "the client was closed during this call: it is unclear whether it took effect"


class ClientThread:
    """Opens a JobClient in a thread with its first call, and lets other threads wait for calls of it.

    A forked process opens one of its own with its first call. ``events`` get what any of them emits;
    ``codec`` encodes what jobs hold, instead of what the settings say.
    """

    def __init__(self, settings: Settings, events: Events, codec: Codec | None = None) -> None:
        self.settings = settings
        self.codec = Contents.of(settings, codec).codec
        self._events = events
        # Held for moments, never while anything is waited for; a signal's handler may need it too.
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._is_closed = False
        _threads_of_process.add(self)

    @property
    def client(self) -> JobClient | None:
        """The client that is open in this process; None: there is none."""
        opened = self._opened
        return None if opened is None else opened.client

    def open(self) -> None:
        """Open the client, also after ``close``; see ``JobClient.open``."""
        _refuse_on_a_loop()
        _refuse_at_exit()
        self._is_closed = False
        self._open()

    def call(self, call: Call[T]) -> T:
        """Return what a call of the client returns; an exception in the waiting thread cancels the call.

        Raises:
            RuntimeError: the client is closed, the interpreter ends, or an event loop runs in this thread.
        """
        _refuse_on_a_loop()
        _refuse_at_exit()
        awaited = _Awaited(call)
        try:
            return self._submit(awaited, self._open()).result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(_CUT_OFF) from None
        except BaseException:  # Ctrl-C, for example; the thread of the client goes on
            awaited.cancel()
            raise

    def result(self, job_id: UUID | str, timeout: float | timedelta | None) -> Any:
        """Return the result of a job; see ``JobClient.result``."""
        return self.call(lambda client: client.result(job_id, timeout))

    def close(self) -> None:
        """Close the client, if it is open; calls that other threads still wait for are cut off."""
        _refuse_on_a_loop()
        with self._lock:
            opened, self._opened, self._is_closed = self._opened, None, True
        if opened is not None and not sys.is_finalizing():
            _end(opened)

    def forget_parent(self) -> None:
        """Leave to the parent process what it has opened, in a child that was just forked."""
        self._lock = threading.RLock()  # another thread, which is not here, may have held it
        if self._opened is not None:
            _inherited.append(self._opened)
            self._opened = None

    def _open(self) -> "_Opened":
        """Return what is open, after its opening, for which all threads wait together."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            if self._opened is None:
                client = JobClient(self.settings, codec=self.codec)
                client.events.on("*", self._pass_on)
                self._opened = _Opened(client)
            opened = self._opened
        try:
            opened.opening.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(_CLOSED) from None
        except BaseException:
            if opened.opening.done():  # else this thread was interrupted, and the next call finds it open
                self._forget(opened)
            raise
        return opened

    def _submit(self, call: Call[T], opened: "_Opened") -> "concurrent.futures.Future[T]":
        with self._lock:
            if self._opened is not opened:
                raise RuntimeError(_CLOSED)
            return opened.submit(call)

    def _forget(self, failed: "_Opened") -> None:
        with self._lock:
            if self._opened is not failed:  # another thread was faster
                return
            self._opened = None
        failed.stop()

    def _pass_on(self, event: Event) -> None:
        self._events.emit(event.name, event.exception, **event.fields)


class _Awaited(Generic[T]):
    """A call that can be cancelled before its future is known: Ctrl-C may come at any instruction."""

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._is_cancelled = False
        self._task: asyncio.Task[Any] | None = None

    async def __call__(self, client: JobClient) -> T:
        self._task = asyncio.current_task()
        if self._is_cancelled:
            raise asyncio.CancelledError
        return await self._call(client)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            with suppress(RuntimeError):  # the client was closed meanwhile
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class _Opened:
    """A JobClient, and the thread with the event loop on which it lives."""

    def __init__(self, client: JobClient) -> None:
        self.client = client
        # Whatever the application's policy says: uvloop's loops do not survive a fork of their process.
        self._loop = _Loop()
        self._stopped = asyncio.Event()
        # A daemon: a program that never closes its client ends all the same; what was accepted is committed.
        self._thread = threading.Thread(target=self._run, name="jsworker client", daemon=True)
        self._thread.start()
        self.opening = self.submit(JobClient.open)

    def submit(self, call: Call[T]) -> "concurrent.futures.Future[T]":
        """Begin a call in the context of the caller."""
        return asyncio.run_coroutine_threadsafe(call(self.client), self._loop)

    def stop(self) -> None:
        """Cancel what is under way, and wait for the thread's end; nothing may be submitted any more."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while not self._stopped.is_set():
                # Code of the application may raise these, as for a payload: asyncio gives them to the caller,
                # and leaves the loop, on which the calls of others go on.
                with suppress(SystemExit, KeyboardInterrupt):
                    runner.run(self._stopped.wait())


class _Loop(asyncio.SelectorEventLoop):
    """Resolves names of hosts for functions of ``atexit``, too: pools of threads have ended by then."""

    async def getaddrinfo(self, *args: Any, **named: Any) -> Any:
        try:
            return await super().getaddrinfo(*args, **named)
        except RuntimeError:  # the pool takes no calls any more; its own errors are OSErrors
            return socket.getaddrinfo(*args, **named)


_threads_of_process: "weakref.WeakSet[ClientThread]" = weakref.WeakSet()
_inherited: list[_Opened] = []
"""What the parent process has opened: to let go of it here would close connections that both share."""


def _end(opened: _Opened) -> None:
    opened.opening.cancel()
    closing = opened.submit(JobClient.close)
    try:
        closing.result()
    finally:
        opened.stop()


def _refuse_on_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(_ON_A_LOOP)


def _refuse_at_exit() -> None:
    """Refuse calls from finalizers: the client's thread, a daemon, has ended, and would never answer."""
    if sys.is_finalizing():
        raise RuntimeError(_EXITING)


def _forget_parent() -> None:
    for each in list(_threads_of_process):
        each.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
