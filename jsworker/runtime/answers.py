"""Answers to messages, sent in bursts. What is answered has been committed before."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from jsworker.batcher import Batcher
from jsworker.stream.delivery import Delivery, Undecodable

_BURST = 1000


class Answers:
    """Sends answers in the order in which they are given, without making anybody wait."""

    def __init__(self, died: Callable[[str, BaseException], None]) -> None:
        self._bursts: Batcher[Callable[[], Awaitable[None]], None] = Batcher(
            "answers", _send, limit=_BURST, died=died
        )

    def ack(self, delivery: Delivery) -> None:
        """Forget the message: its job has been seen to."""
        self._bursts.post(delivery.ack)

    def nak(self, delivery: Delivery | Undecodable, delay: float = 0.0) -> None:
        """Deliver the message again, to anybody, after ``delay`` seconds."""
        self._bursts.post(partial(delivery.nak, delay))

    def term(self, delivery: Delivery | Undecodable) -> None:
        """Forget a message that nobody can use."""
        self._bursts.post(delivery.term)

    def in_progress(self, delivery: Delivery) -> None:
        """Restart the message's ``ack_wait``: its job is still worked on."""
        self._bursts.post(delivery.in_progress)

    async def flush(self) -> None:
        """Wait until all answers given so far are sent."""
        await self._bursts.flush()

    async def close(self) -> None:
        """Give up answers that are not sent; their messages come again."""
        await self._bursts.close()


async def _send(burst: Sequence[Callable[[], Awaitable[None]]]) -> Sequence[None]:
    for answer in burst:
        await answer()
    return [None] * len(burst)
