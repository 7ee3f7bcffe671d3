"""A client's way to the stream: connected in the background, and checked before anything is published."""

import asyncio
from typing import Final

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from jsworker.core.errors import JsworkerError, StreamUnavailable
from jsworker.core.events import Events
from jsworker.stream.jetstream import Stream
from jsworker.stream.nats_client import end_tasks

_AGAIN_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
_END_SECONDS: Final = 2.0


class StreamLink:
    """Keeps a client's stream usable: connected, and checked anew after every loss of the connection.

    Unchecked, a stream that was made meanwhile might be another installation's.

    Attributes:
        silent_because: why the last message was not acknowledged; None: it was, or the stream has been
            checked since.
    """

    def __init__(self, stream: Stream, events: Events) -> None:
        self.silent_because: str | None = None
        self._stream = stream
        self._events = events
        self._connected_once = False
        self._lost = asyncio.Event()
        self._ready = False
        self._reason: str | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def stream(self) -> Stream | None:
        """The stream, None while nothing can be published to it."""
        return self._stream if self._ready and self._stream.connected else None

    @property
    def reason(self) -> str:
        """Why nothing can be published, while that is so."""
        return self._reason or "NATS is not connected"

    async def open(self, seconds: float) -> None:
        """Try to connect for about ``seconds``; go on in the background when NATS does not answer.

        Raises:
            SettingsError: an address or a file cannot be used.
            StreamRefused: the login or the stream cannot be used as configured.
        """
        self._stream.on_disconnect(self._on_lost)
        try:
            await self._prepare(seconds)
        except StreamUnavailable as error:
            self._note(str(error))
        self._keeping = asyncio.create_task(self._keep_ready(), name="jsworker stream")

    async def close(self) -> None:
        """Disconnect within seconds; never raises."""
        self._ready = False
        if self._keeping is not None:
            await end_tasks({self._keeping}, _END_SECONDS)
        await self._stream.close()

    async def _keep_ready(self) -> None:
        while True:
            if self._ready:
                await self._lost.wait()
            # Whatever it is may end: a login is mended, a stream deleted, a file written.
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Exception),
                wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_SECONDS),
            ):
                with attempt:
                    await self._prepare_or_note()

    async def _prepare_or_note(self) -> None:
        try:
            await self._prepare(_AGAIN_SECONDS)
        except Exception as error:
            self._note(str(error) if isinstance(error, JsworkerError) else f"{type(error).__name__}: {error}")
            raise

    async def _prepare(self, seconds: float) -> None:
        self._lost.clear()
        if not self._connected_once:
            await self._stream.connect(timeout=seconds)
            self._connected_once = True
        elif not await self._stream.connection.wait_connected(seconds):
            raise StreamUnavailable("NATS is not connected")
        await self._stream.ensure([], timeout=seconds)
        if not self._lost.is_set():
            self._ready = True
            self.silent_because = None
            if self._reason is not None:
                self._reason = None
                self._events.emit("worker.restored", what="publishing")

    def _on_lost(self) -> None:
        self._ready = False
        self._lost.set()

    def _note(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._events.emit("worker.degraded", what="publishing", reason=reason)
