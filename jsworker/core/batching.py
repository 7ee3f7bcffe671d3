"""Natural batching: while one batch is on its way the next one gathers; a lone item waits for nothing."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")
_Taker: TypeAlias = asyncio.Future[AnswerT] | Callable[[AnswerT], None] | None


class Batcher(Generic[ItemT, AnswerT]):
    """Gathers items that are submitted one by one and writes them together, one batch at a time.

    Args:
        name: what it is called when it dies.
        write: writes a batch and returns one answer for each item, in order; expects its own errors.
        limit: most items in one batch; the attribute may be changed at any time.
        died: called with the name and the error when ``write`` raises all the same.
        linger: seconds for which the first item waits for others; ``flush`` cuts them short.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[ItemT]], Awaitable[Sequence[AnswerT]]],
        *,
        limit: int,
        died: Callable[[str, BaseException], None],
        linger: float = 0.0,
    ) -> None:
        self._name = name
        self._write = write
        self.limit = limit
        self._died = died
        self._linger = linger
        self._hurry = asyncio.Event()
        self._waiting: deque[tuple[ItemT, _Taker[AnswerT]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def submit(self, item: ItemT) -> asyncio.Future[AnswerT]:
        """Queue an item; the future brings its answer, or the error of its batch."""
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._queue(item, answer)
        return answer

    def post(self, item: ItemT, then: Callable[[AnswerT], None] | None = None) -> None:
        """Queue an item without waiting for its answer; ``then`` is called with it, but not without one."""
        self._queue(item, then)

    @property
    def is_busy(self) -> bool:
        """Whether anything has not been answered yet."""
        return self._task is not None and not self._task.done()

    async def flush(self) -> None:
        """Wait until everything submitted so far has been answered."""
        while self._task is not None and self.is_busy:
            self._hurry.set()
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Give up what has not been answered yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for _, answer in self._waiting:
            _cancel(answer)
        self._waiting.clear()

    def _queue(self, item: ItemT, answer: _Taker[AnswerT]) -> None:
        self._waiting.append((item, answer))
        if self._task is None or self._task.done():
            self._hurry.clear()
            self._task = asyncio.create_task(self._drain(), name=f"jsworker {self._name}")

    async def _drain(self) -> None:
        if self._linger:
            await self._wait_for_others()
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self.limit, len(self._waiting)))]
            try:
                answers = await self._write([item for item, _ in batch])
                self._give_all(batch, answers)
            except asyncio.CancelledError:
                for _, answer in batch:
                    _cancel(answer)
                raise
            except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
                for _, answer in batch:
                    _refuse(answer, error)
                self._died(self._name, error)

    def _give_all(self, batch: Sequence[tuple[ItemT, _Taker[AnswerT]]], answers: Sequence[AnswerT]) -> None:
        """Give every answer to its taker; one that raises keeps no other from its own."""
        for (_, answer), value in zip(batch, answers, strict=True):
            try:
                _give(answer, value)
            except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
                self._died(self._name, error)

    async def _wait_for_others(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._hurry.wait()


def _give(answer: _Taker[AnswerT], value: AnswerT) -> None:
    if isinstance(answer, asyncio.Future):
        if not answer.done():
            answer.set_result(value)
    elif answer is not None:
        answer(value)


def _cancel(answer: _Taker[AnswerT]) -> None:
    if isinstance(answer, asyncio.Future):
        answer.cancel()


def _refuse(answer: _Taker[AnswerT], error: Exception) -> None:
    if isinstance(answer, asyncio.Future) and not answer.done():
        answer.set_exception(error)
        answer.exception()  # not every submitter waits; the worker knows of it
