"""Deletes a whole stream, for ``jsworker.testing``, which makes one for each test; no worker does so."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.api import JetStreamApi, NotThere
from jsworker.stream.connection import Connection


@asynccontextmanager
async def _connected(settings: Settings, seconds: float) -> AsyncIterator[JetStreamApi]:
    api = JetStreamApi(Connection(settings, events=Events(), name="jsworker testing"), settings)
    await api.connect(seconds)
    try:
        yield api
    finally:
        await api.close()


async def check_answers(settings: Settings, seconds: float) -> None:
    """Return once NATS accepts a connection, within ``seconds``; raises as ``Stream.connect`` does."""
    async with _connected(settings, seconds):
        return


async def delete_stream(settings: Settings, seconds: float) -> None:
    """Delete the stream that the settings name, if there is one."""
    async with _connected(settings, seconds) as api:
        with suppress(NotThere):
            deleting = api.manager.delete_stream(settings.stream)
            await api.ask(f"STREAM.DELETE.{settings.stream}", deleting)
