"""Natural batching: while one batch is on its way the next one gathers; a lone item waits for nothing."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


class Batcher(Generic[ItemT, AnswerT]):
    """Gathers items that are submitted one by one and writes them together, one batch at a time."""

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[ItemT]], Awaitable[Sequence[AnswerT]]],
        *,
        limit: int,
        died: Callable[[str, BaseException], None],
    ) -> None:
        """Prepare the batcher.

        Args:
            name: what it is called when it dies.
            write: writes a batch and returns one answer for each item, in order; expects its own errors.
            limit: most items in one batch.
            died: told name and error when ``write`` raises all the same.
        """
        self._name = name
        self._write = write
        self._limit = limit
        self._died = died
        self._waiting: deque[tuple[ItemT, asyncio.Future[AnswerT] | None]] = deque()
        self._task: asyncio.Task[None] | None = None

    def submit(self, item: ItemT) -> asyncio.Future[AnswerT]:
        """Queue an item; the future brings its answer, or the error of its batch."""
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._queue(item, answer)
        return answer

    def post(self, item: ItemT) -> None:
        """Queue an item whose answer nobody waits for."""
        self._queue(item, None)

    async def flush(self) -> None:
        """Wait until everything submitted so far has been answered."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Give up what has not been answered yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for _, answer in self._waiting:
            _cancel(answer)
        self._waiting.clear()

    def _queue(self, item: ItemT, answer: asyncio.Future[AnswerT] | None) -> None:
        self._waiting.append((item, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name=f"jsworker {self._name}")

    async def _drain(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
            try:
                answers = await self._write([item for item, _ in batch])
            except asyncio.CancelledError:
                for _, answer in batch:
                    _cancel(answer)
                raise
            except Exception as error:  # noqa: BLE001 -- told to the worker, which stops
                for _, answer in batch:
                    _refuse(answer, error)
                self._died(self._name, error)
            else:
                for (_, answer), value in zip(batch, answers, strict=True):
                    if answer is not None and not answer.done():
                        answer.set_result(value)


def _cancel(answer: asyncio.Future[AnswerT] | None) -> None:
    if answer is not None:
        answer.cancel()


def _refuse(answer: asyncio.Future[AnswerT] | None, error: Exception) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)
        answer.exception()  # not every submitter waits; the worker has been told
