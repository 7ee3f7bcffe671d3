"""Natural batching: while one batch is written, the next one gathers; a lone item is written at once."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Final, Generic, TypeAlias, TypeVar, cast

_MANY: Final = 16
"""From this number of items on, a batch waits for more items."""
_GROWING_SECONDS: Final = 0.02

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")
_Taker: TypeAlias = asyncio.Future[AnswerT] | Callable[[AnswerT], None] | None


class Batcher(Generic[ItemT, AnswerT]):
    """Gathers items that are submitted one by one and writes them together, one batch at a time.

    ``write`` returns one answer for each item, in order, or None for all of them, and should handle its
    errors; if it raises, ``died`` is called with the name and the error. ``limit``, the most items in one
    batch, may be changed at any time. An item is written between ``linger`` and twice ``linger`` seconds
    after it was submitted; ``flush`` ends that wait. Sixteen items or more wait for one turn of the event
    loop, and for further turns while each brings more items, up to 0.02 s: every write costs a statement and
    a commit, however many items it has.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[ItemT]], Awaitable[Sequence[AnswerT] | None]],
        *,
        limit: int,
        died: Callable[[str, BaseException], None],
        linger: float = 0.0,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        self._name = name
        self._write = write
        self.limit = limit
        self._died = died
        self._linger = linger
        self._idle = idle
        self._context = copy_context()  # not the context of a submitter, which may be a job's
        self._hurry = asyncio.Event()
        self._waiting: deque[tuple[ItemT, _Taker[AnswerT]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def submit(self, item: ItemT) -> asyncio.Future[AnswerT]:
        """Queue an item; the future brings its answer, or the error of its batch."""
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self.post(item, answer)
        return answer

    def post(self, item: ItemT, taker: _Taker[AnswerT] = None) -> None:
        """Queue an item; its answer goes to ``taker``. A function is called only if there is an answer.

        After ``close`` the item is given up at once: nothing would wait for the task that writes it.
        """
        if self._is_closed:
            for answer in _awaited([(item, taker)]):
                answer.cancel()
            return
        self._waiting.append((item, taker))
        self._begin()

    @property
    def is_busy(self) -> bool:
        """Whether anything has not been answered yet."""
        return bool(self._waiting) or (self._task is not None and not self._task.done())

    async def flush(self) -> None:
        """Wait until everything submitted so far has been answered."""
        while self.is_busy:
            task = self._begin()  # a new task, if all tasks of the event loop have been cancelled
            self._hurry.set()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Give up the items that have no answer yet, and all that are submitted later."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for answer in _awaited(self._waiting):
            answer.cancel()
        self._waiting.clear()

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._hurry.clear()
            name, context = f"jsworker {self._name}", self._context.copy()
            # Not by the loop's task factory: an eager one would write before other items can gather.
            loop = asyncio.get_running_loop()
            self._task = asyncio.Task(self._drain(), loop=loop, name=name, context=context)
        return self._task

    async def _drain(self) -> None:
        while self._waiting:
            ready = len(self._waiting)  # items that come while these linger are for the next round
            if not (self._linger and await self._linger_unless_hurried()):
                await self._grow()
                ready = min(self.limit, len(self._waiting))  # items that come during the write join the rest
            while ready > 0:
                batch = [self._waiting.popleft() for _ in range(min(self.limit, ready))]
                ready -= len(batch)
                await self._write_batch(batch)
        self._idle()

    async def _write_batch(self, batch: Sequence[tuple[ItemT, _Taker[AnswerT]]]) -> None:
        try:
            answers = await self._write([item for item, _ in batch])
            if answers is None:
                answers = cast("Sequence[AnswerT]", [None] * len(batch))
            self._give_all(batch, answers)
        except asyncio.CancelledError:
            for answer in _awaited(batch):
                answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
            for answer in _awaited(batch):
                answer.set_exception(error)
                answer.exception()  # marks it as retrieved: not every submitter waits for it
            self._died(self._name, error)

    def _give_all(self, batch: Sequence[tuple[ItemT, _Taker[AnswerT]]], answers: Sequence[AnswerT]) -> None:
        """Give every answer to its taker; if a taker raises, the others still get theirs."""
        for (_, taker), answer in zip(batch, answers, strict=True):
            try:
                if isinstance(taker, asyncio.Future):
                    if not taker.done():
                        taker.set_result(answer)
                elif taker is not None:
                    taker(answer)
            except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
                self._died(self._name, error)

    async def _grow(self) -> None:
        ends = time.monotonic() + _GROWING_SECONDS
        before = _MANY - 1
        while before < len(self._waiting) < self.limit and time.monotonic() < ends:
            before = len(self._waiting)
            await asyncio.sleep(0)

    async def _linger_unless_hurried(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._hurry.wait()
        return not self._hurry.is_set()


def _awaited(batch: Iterable[tuple[ItemT, _Taker[AnswerT]]]) -> list[asyncio.Future[AnswerT]]:
    takers = (taker for _, taker in batch)
    return [taker for taker in takers if isinstance(taker, asyncio.Future) and not taker.done()]
