"""The functions of ``jsworker.testing``, blocking, for tests that are plain functions."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from jsworker import testing

A = ParamSpec("A")
T = TypeVar("T")

__all__ = [
    "advance",
    "assert_enqueued",
    "assert_not_enqueued",
    "kill_worker_during",
    "run_job",
    "work_until_empty",
]


def _blocking(function: Callable[A, Coroutine[Any, Any, T]]) -> Callable[A, T]:
    @wraps(function)
    def call(*args: A.args, **kwargs: A.kwargs) -> T:
        __tracebackhide__ = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(function(*args, **kwargs))
        name = function.__name__
        raise RuntimeError(
            f"in an async test: await jsworker.testing.{name}, not that of jsworker.testing.sync"
        )

    return call


advance: Final = _blocking(testing.advance)
assert_enqueued: Final = _blocking(testing.assert_enqueued)
assert_not_enqueued: Final = _blocking(testing.assert_not_enqueued)
kill_worker_during: Final = _blocking(testing.kill_worker_during)
run_job: Final = _blocking(testing.run_job)
work_until_empty: Final = _blocking(testing.work_until_empty)
