"""FastAPI: one client for the application, opened and closed with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

from fastapi import Depends, FastAPI
from starlette.requests import HTTPConnection

from jsworker.client.job_client import JobClient
from jsworker.core.settings import Settings, load_settings


@asynccontextmanager
async def jobs_lifespan(app: FastAPI, settings: Settings | None = None) -> AsyncIterator[None]:
    """Keep a client open as long as the application lives: ``FastAPI(lifespan=jobs_lifespan)``.

    In a lifespan of your own: ``async with jobs_lifespan(app): yield``.

    Args:
        app: the application; its routes get the client as ``Client``.
        settings: None: those of the environment.
    """
    async with JobClient(settings or load_settings()) as client:
        app.state.job_client = client
        try:
            yield
        finally:
            del app.state.job_client


def job_client(connection: HTTPConnection) -> JobClient:
    """Return the client of the application; RuntimeError: ``jobs_lifespan`` has not opened one.

    A mounted application has no lifespan of its own: give it the state of the outer one.
    """
    client: JobClient | None = getattr(connection.app.state, "job_client", None)
    if client is None:
        raise RuntimeError(
            "the application has no client of jsworker: FastAPI(lifespan=jobs_lifespan); "
            "if it is mounted in another one: mounted.state = outer.state"
        )
    return client


Client: TypeAlias = Annotated[JobClient, Depends(job_client)]
"""Type of a route's parameter that receives the application's client."""
