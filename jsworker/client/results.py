"""Waits for jobs to end: one reader for all waiters of a client reads rows, sooner after a hint by NATS."""

import asyncio
import heapq
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Final, Generic, Self, TypeAlias, cast
from uuid import UUID

from typing_extensions import TypeVar

from jsworker.core.contents import Contents
from jsworker.core.errors import (
    DatabaseTimeout,
    InvalidJson,
    JobCancelled,
    JobFailed,
    JobGone,
    JsworkerError,
    UsageError,
    may_answer_later,
)
from jsworker.core.job import kinds_of_slot
from jsworker.core.names import printable, shown
from jsworker.core.processor import JobProcessor, read_result
from jsworker.core.settings.variables import LONGEST_SECONDS
from jsworker.ownership.database import Database
from jsworker.ownership.queries.results import (
    ENDS_BYTES,
    MOST_ENDS,
    JobEnd,
    live_kind,
    read_ends,
    read_whole_end,
)
from jsworker.ownership.refusals import in_halves, readers_right
from jsworker.ownership.transitions.enqueue import Enqueued
from jsworker.stream.result_hints import RENEW_SECONDS, HintReceiver

T = TypeVar("T")
R = TypeVar("R", default=Any)
ResultReader: TypeAlias = Callable[[UUID, float | timedelta | None], Any]
"""Waits for the result of a job, or returns what is to be awaited; a time of None: without a limit."""

_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 2.0
PAUSE_OF_OUTAGE_SECONDS: Final = 0.5
_READ_AT_ONCE: Final = 5000
_LARGE_AT_ONCE: Final = 3
_MOST_LATE_ALONE: Final = 3
"""So often the time for one result is doubled: while its read lasts, all others wait."""
_MOST_HINTS: Final = 10
"""The most hints used for one job; a worker sends one. After forged ones, its row is read by the clock."""
_CLOSED: Final = "the client was closed"
_LINE_CHARACTERS: Final = 300


class _Awaited:
    """A job that is waited for; ``read_at``, when its row is read next, is infinite during a read."""

    __slots__ = ("hints", "pause", "read_at", "waiters")

    def __init__(self) -> None:
        self.waiters: set[asyncio.Future[JobEnd]] = set()
        self.pause = _FIRST_PAUSE_SECONDS / 2
        self.read_at = math.inf
        self.hints = 0


_Taken = dict[UUID, list[asyncio.Future[JobEnd]]]
"""Jobs that are being read, each with the waiters that the read answers: not those that came later."""


class Results:
    """Waits for the results of jobs; the rows of all awaited jobs are read together."""

    def __init__(self, database: Database, contents: Contents) -> None:
        self._database = database
        self._contents = contents
        self._awaited: dict[UUID, _Awaited] = {}
        self._due: list[tuple[float, UUID]] = []
        self._unannounced: list[UUID] = []
        self._renew_at = math.inf
        self._most = MOST_ENDS
        self._late_alone = 0
        self._offset = random.uniform(0, _LONGEST_PAUSE_SECONDS)  # noqa: S311 -- spreads load, hides nothing
        self._reading: asyncio.Task[None] | None = None
        self._trouble: JsworkerError | None = None
        self.open(None)

    def open(self, hints: HintReceiver | None) -> None:
        """Take results, with hints from workers that jobs have ended; None: without NATS there are none."""
        self._is_closed = False
        self._news = asyncio.Event()  # the event loop may be another one than before
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._hints = hints
        if hints is not None:
            hints.take = self._on_hint

    async def result(self, job_id: UUID, timeout: float | timedelta | None) -> Any:  # noqa: ASYNC109 -- see JobClient.result
        """Return the result of a job once it has completed; see ``JobClient.result``."""
        limit = seconds_to_wait(timeout)
        try:
            async with asyncio.timeout(limit) as waiting:
                if served := kinds_of_slot.get():
                    await self._refuse_deadlock(job_id, served)
                end = await self._wait(job_id)
                if end.is_cut:
                    end = await self._fetch(end)
        except TimeoutError:
            if not waiting.expired():
                raise
            because = "" if self._trouble is None else f": {self._trouble}"
            raise TimeoutError(f"job {job_id} has not ended within {limit:g} s{because}") from None
        return _result_of(end, self._contents)

    async def close(self) -> None:
        """End every wait with an error."""
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            self._reading = None  # the client may be opened next in another event loop
        self._fail(list(self._awaited), RuntimeError(_CLOSED))

    async def _refuse_deadlock(self, job_id: UUID, served: frozenset[str]) -> None:
        kind = await self._until_answered(lambda _: live_kind(self._database, job_id))
        if kind in served:
            raise UsageError(
                f"job {job_id} cannot be waited for inside a job of this worker, which serves kind {kind}"
                " itself: jobs that wait could take all of its slots; let another worker serve that kind, or"
                " enqueue what follows and return"
            )

    async def _wait(self, job_id: UUID) -> JobEnd:
        self._check_open()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[JobEnd] = loop.create_future()
        awaited = self._awaited.get(job_id)
        if awaited is None:
            awaited = self._awaited[job_id] = _Awaited()
            self._unannounced.append(job_id)
        awaited.waiters.add(waiter)
        self._read_now(job_id, awaited)
        if self._reading is None or self._reading.done():
            self._renew_at = loop.time() + RENEW_SECONDS
            self._reading = asyncio.create_task(self._read_while_awaited(), name="jsworker results")
        try:
            return await waiter
        finally:
            awaited.waiters.discard(waiter)
            if not awaited.waiters and self._awaited.get(job_id) is awaited:
                del self._awaited[job_id]
                self._news.set()

    async def _fetch(self, end: JobEnd) -> JobEnd:
        async def fetch(tries: int) -> JobEnd:
            async with self._large:
                return await read_whole_end(self._database, end, tries=tries)

        return await self._until_answered(fetch)

    async def _until_answered(self, ask: Callable[[int], Awaitable[T]]) -> T:
        for tries in count():
            self._check_open()
            try:
                with readers_right("result", "SELECT on jsworker.jobs"):
                    return await ask(tries)
            except JsworkerError as error:
                if not may_answer_later(error):
                    raise
                self._trouble = error
            await asyncio.sleep(PAUSE_OF_OUTAGE_SECONDS)
        raise AssertionError

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(_CLOSED)

    async def _read_while_awaited(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._awaited:
            self._news.clear()
            self._announce(clock())
            if taken := self._take_due(clock()):
                await self._read(taken)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(self._due[0][0], self._renew_at) if self._due else None):
                    await self._news.wait()
        self._due.clear()
        self._unannounced.clear()

    def _announce(self, now: float) -> None:
        """Tell workers which jobs are awaited, before their rows are read: later ends are then hinted at."""
        if now >= self._renew_at:
            self._renew_at = now + RENEW_SECONDS
            ids = list(self._awaited)
        else:
            ids = [job_id for job_id in self._unannounced if job_id in self._awaited]
        self._unannounced.clear()
        if ids and self._hints is not None:
            self._hints.announce(ids)

    def _take_due(self, now: float) -> _Taken:
        taken: _Taken = {}
        while self._due and self._due[0][0] <= now and len(taken) < _READ_AT_ONCE:
            read_at, job_id = heapq.heappop(self._due)
            awaited = self._awaited.get(job_id)
            if awaited is not None and awaited.read_at == read_at:  # else a newer entry replaces this one
                awaited.read_at = math.inf
                taken[job_id] = list(awaited.waiters)
        return taken

    async def _read(self, taken: _Taken) -> None:
        ids = list(taken)
        ends: list[JobEnd] = []
        most, least = self._most, 0.0
        seconds = self._database.seconds_for(ENDS_BYTES, tries=self._late_alone)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            with readers_right("result", "SELECT on jsworker.jobs"):
                read = partial(read_ends, self._database, most=most, seconds=seconds)
                ends, refused = await in_halves(ids, read)
            for job_id, error in refused:
                self._fail([job_id], error)
            self._trouble = None
            if clock() - began < seconds / 3:  # else twice as many, or half the time, would often be too much
                self._ask_for_more(is_full=len(ends) >= most)
        except JsworkerError as error:
            if isinstance(error, DatabaseTimeout):  # many results may be too much for a slow connection
                if most == 1:
                    self._late_alone = min(self._late_alone + 1, _MOST_LATE_ALONE)
                self._most = max(min(most, len(ids)) // 2, 1)
            if may_answer_later(error):
                self._trouble, least = error, PAUSE_OF_OUTAGE_SECONDS
            else:
                self._fail(ids, error)
        except Exception as error:  # noqa: BLE001 -- else all waiters would wait for ever
            self._fail(ids, error)
        for end in ends:
            await _give(end, taken[end.id])
            if (awaited := self._awaited.get(end.id)) is not None:
                awaited.waiters.difference_update(taken[end.id])
                if not awaited.waiters:
                    del self._awaited[end.id]
        self._look_later(ids, again_at_once=len(ends) >= most, least=least)

    def _ask_for_more(self, *, is_full: bool) -> None:
        if self._late_alone:
            self._late_alone -= 1
        elif is_full:
            self._most = min(2 * self._most, MOST_ENDS)

    def _look_later(self, ids: Iterable[UUID], *, again_at_once: bool, least: float) -> None:
        now = asyncio.get_running_loop().time()
        for job_id in ids:
            awaited = self._awaited.get(job_id)
            if awaited is None or awaited.read_at != math.inf:  # ended, or its next read is planned already
                continue
            if again_at_once:
                awaited.read_at = now
            else:
                awaited.pause = pause = min(max(2 * awaited.pause, least), _LONGEST_PAUSE_SECONDS)
                # At multiples of the pause, so that many are read together; each client has its own offset.
                awaited.read_at = ((now + self._offset) // pause + 1) * pause - self._offset
            heapq.heappush(self._due, (awaited.read_at, job_id))

    def _on_hint(self, job_id: UUID) -> None:
        awaited = self._awaited.get(job_id)
        if awaited is None or awaited.hints >= _MOST_HINTS:
            return
        awaited.hints += 1
        self._read_now(job_id, awaited)

    def _read_now(self, job_id: UUID, awaited: _Awaited) -> None:
        now = asyncio.get_running_loop().time()
        if awaited.read_at > now:
            awaited.read_at = now
            heapq.heappush(self._due, (now, job_id))
        self._news.set()

    def _fail(self, ids: Iterable[UUID], error: BaseException) -> None:
        for job_id in ids:
            if (awaited := self._awaited.pop(job_id, None)) is not None:
                for waiter in awaited.waiters:
                    if not waiter.done():
                        waiter.set_exception(error)


class Handle(Enqueued, Generic[R]):
    """The result of an enqueue by a client, with the way to the job's result."""

    _read: ResultReader | None = None
    _kind: str | type[JobProcessor[Any]] = ""

    @classmethod
    def of(cls, enqueued: Enqueued, read: ResultReader, kind: str | type[JobProcessor[Any]]) -> Self:
        """Return the handle of a job of a kind or a processor; ``read`` waits for its result."""
        handle = cls(*enqueued)
        handle._read = read
        handle._kind = kind
        return handle

    def _wait(self, timeout: float | timedelta | None) -> Any:
        if self._read is None:
            raise RuntimeError(f"this handle belongs to no client: use client.result({str(self.id)!r})")
        return self._read(self.id, timeout)

    def _returned(self, result: Any) -> R:
        """Return a result, a JSON value, as the type that the job's processor returns."""
        if isinstance(self._kind, str):
            return cast("R", result)
        try:
            return cast("R", read_result(self._kind, result))
        except InvalidJson as error:
            raise InvalidJson(f"job {self.id} of kind {self._kind.kind}: {error}") from None

    def __reduce__(self) -> tuple[type[Enqueued], tuple[UUID, bool]]:
        return Enqueued, (self.id, self.created)


class JobHandle(Handle[R]):
    """The result of an enqueue, the tuple ``(id, created)``, from which the job's result can be awaited.

    If not ``created``, ``id`` and the result are those of the live job that holds the unique key.
    """

    async def result(self, timeout: float | timedelta | None = None) -> R:  # noqa: ASYNC109 -- as asyncio.wait_for
        """Return the job's result once it has completed; see ``JobClient.result``.

        If the job was enqueued by its processor, the JSON value is converted to the type that ``process``
        returns; if by a kind's name, the JSON value is returned.

        Raises the errors of ``JobClient.result``, and InvalidJson if the result does not fit that type.
        """
        return self._returned(await self._wait(timeout))


def seconds_to_wait(timeout: float | timedelta | None) -> float | None:
    """Return the time-out of a result in seconds.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is not more than 0, or is longer than ``LONGEST_SECONDS``.
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(
            f"timeout={shown(timeout)} must be seconds or a timedelta, not {type(timeout).__name__}"
        )
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(
            f"timeout={shown(timeout)} must be more than 0 and at most {LONGEST_SECONDS} seconds"
        )
    return float(seconds)


async def _give(end: JobEnd, waiters: Iterable[asyncio.Future[JobEnd]]) -> None:
    """Give each waiter a value of its own, which it may change; other tasks run between the copies."""
    left = list(waiters)
    while left:
        waiter = left.pop()
        if waiter.done():
            continue
        try:
            waiter.set_result(end._replace(result=deepcopy(end.result)) if left else end)
        except Exception as error:  # noqa: BLE001 -- else the reader would end, and all others wait for ever
            waiter.set_exception(error)
        if left:
            await asyncio.sleep(0)


def _result_of(end: JobEnd, contents: Contents) -> Any:
    if end.status == "completed":
        return contents.decode_value(end.result, "result", end.kind, end.id)
    lines = (end.error or "").strip().splitlines()
    error: JobFailed | JobCancelled | JobGone
    reason = f" ({end.reason})" if end.reason else ""
    if end.status == "failed":
        line = f": {printable(lines[0], _LINE_CHARACTERS)}" if lines else ""
        error = JobFailed(f"job {end.id} failed{reason}{line}")
    elif end.status == "cancelled":
        error = JobCancelled(f"job {end.id} was cancelled{reason}")
    else:
        why = "it was pruned after its end, or there never was one, or its enqueueing is not committed"
        error = JobGone(f"no job has id {end.id}: {why}")
    error.job_id, error.error, error.reason = end.id, end.error, end.reason
    raise error
