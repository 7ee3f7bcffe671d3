"""The application: `uvicorn fastapi_app.app:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_app.database import Base, Order, open_sessions
from fastapi_app.jobs import Receipt, WriteReceipt
from jsworker import (
    JobCancelled,
    JobFailed,
    JobGone,
    JobNotFound,
    enqueue_statement,
    load_settings,
)
from jsworker.contrib.fastapi import Client, jobs_lifespan


class NewOrder(BaseModel):
    """What is ordered."""

    item: str
    cents: int


class Accepted(BaseModel):
    """The order's number, and the job that writes its receipt."""

    order_id: int
    job_id: UUID


class JobStatus(BaseModel):
    """How a job is."""

    status: str
    progress: float | None
    attempts: int
    error: str | None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the client and the application's own sessions; make its table, as Alembic would elsewhere."""
    app.state.sessions = sessions = open_sessions(load_settings().database_dsn())
    engine: AsyncEngine = sessions.kw["bind"]
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with jobs_lifespan(app):
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place_order(new: NewOrder, request: Request, client: Client, later: BackgroundTasks) -> Accepted:
    """Store an order and enqueue its job in one transaction: there is never one without the other."""
    async with request.app.state.sessions.begin() as session:
        order = Order(item=new.item, cents=new.cents)
        session.add(order)
        await session.flush()
        job = (await session.execute(enqueue_statement(WriteReceipt, Receipt(order_id=order.id)))).one()
    later.add_task(client.publish_pending)  # else workers publish it, within half a second
    return Accepted(order_id=order.id, job_id=job.id)


@app.get("/jobs/{job_id}")
async def show_job(job_id: UUID, client: Client) -> JobStatus:
    """Tell how a job is."""
    try:
        job = await client.get(job_id)
    except JobNotFound:
        raise HTTPException(404, "no such job") from None
    error = job.last_error and job.last_error.splitlines()[0]
    return JobStatus(status=job.status, progress=job.progress, attempts=job.attempts, error=error)


@app.get("/jobs/{job_id}/result")
async def wait_for_result(job_id: UUID, client: Client, seconds: float = 10.0) -> Any:
    """Wait for a job's result, for half a minute at most."""
    try:
        return await client.result(job_id, timeout=min(seconds, 30.0))
    except TimeoutError:
        raise HTTPException(504, "the job has not ended yet: ask again") from None
    except (JobFailed, JobCancelled) as error:
        raise HTTPException(409, str(error)) from None
    except JobGone:
        raise HTTPException(404, "no such job") from None
