"""Plain functions of processors run in threads of their own, and call the worker's loop from there."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from jsworker.core.errors import JsworkerError
from jsworker.core.tracebacks import message_of, type_name

T = TypeVar("T")


class ThreadNotStarted(JsworkerError):
    """The system starts no thread for a plain function, which has not been called."""


def start_thread(name: str, call: Callable[[], T], what: str) -> tuple[threading.Thread, "asyncio.Future[T]"]:
    """Start a call in a thread, with a copy of the context, and return what will hold its outcome.

    ``what`` names the call in an error. Raises ThreadNotStarted.
    """
    ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    ended.add_done_callback(retrieve_error)
    context = contextvars.copy_context()
    # A daemon: a function that never returns must not keep the process from ending.
    thread = threading.Thread(target=context.run, args=(_body, call, what, ended), name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        why = f"{type(error).__name__}: {message_of(error)}"
        raise ThreadNotStarted(f"its thread could not be started: {why}") from error
    return thread, ended


def _body(call: Callable[[], T], what: str, ended: "asyncio.Future[T]") -> None:
    try:
        try:
            value = call()
        finally:  # a trace function that the call has left set may raise, and the outcome would be lost
            sys.settrace(None)
        settle = partial(ended.set_result, value)
    except (StopIteration, GeneratorExit) as error:  # a future cannot carry them
        raised = RuntimeError(f"{what} raised {type_name(error)}: {message_of(error)}")
        settle = partial(ended.set_exception, raised)
    except BaseException as error:  # noqa: BLE001 -- handed to who waits, which judges it
        settle = partial(ended.set_exception, error)
    with suppress(RuntimeError):  # the loop is closed: the worker has gone, and the stale rule has the job
        ended.get_loop().call_soon_threadsafe(settle)


def retrieve_error(ended: "asyncio.Future[Any]") -> None:
    """Retrieve an error that nothing may wait for any more: asyncio would report it, with a job's content."""
    if not ended.cancelled():
        ended.exception()


def wait_for_loop(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the worker's loop from a processor's thread."""
    try:
        refuse_on_a_loop()
    except RuntimeError:
        call.close()
        raise
    return asyncio.run_coroutine_threadsafe(call, loop).result()


def refuse_on_a_loop() -> None:
    """Raise RuntimeError on an event loop, which must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("job.sync is for plain functions in a thread; await the job's own calls")
