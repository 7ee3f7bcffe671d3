"""A worker looks up its servers' names although jobs keep every thread of the default executor busy."""

import asyncio
import socket
from unittest import mock

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.supervisor.event_loops import EventLoop
from tests.ownership.rows import Sql, read_job, read_value
from tests.supervisor.conftest import Supervise
from tests.support.polling import eventually
from tests.support.proxy import proxied


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_worker_connects_to_named_servers_again_while_jobs_use_every_thread(
    supervise: Supervise, client: JobClient, sql: Sql, settings: Settings, event_loop: str
) -> None:
    async with (
        proxied(settings.database_url) as (postgresql, database_url),
        proxied(settings.nats_url) as (
            nats,
            nats_url,
        ),
    ):
        parent = supervise(
            "FillsThreads",
            event_loop=event_loop,
            stale_threshold=3600.0,
            crash_threshold=1800.0,
            ack_wait=4000.0,
            database_url=database_url.replace("127.0.0.1", "localhost"),
            nats_url=nats_url.replace("127.0.0.1", "localhost"),
        )
        await parent.ready()
        job = await client.enqueue("fills-threads", {})

        async def are_used() -> None:
            assert read_job(sql, job.id)["stage"] == "full"

        await eventually(are_used)
        postgresql.break_connections()
        nats.break_connections()
        broken_at = read_value(sql, "SELECT clock_timestamp()")

        async def beats_again() -> None:
            assert read_job(sql, job.id)["last_activity_at"] > broken_at
            assert [line for line in parent.lines("worker.restored") if line["what"] == "nats"]

        await eventually(beats_again)
        assert read_job(sql, job.id)["fencing_token"] == 1


def test_a_lookup_for_which_no_thread_can_be_started_fails_like_any_other() -> None:
    async def look_up() -> None:
        with (
            mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")),
            pytest.raises(OSError, match="can't start new thread"),
        ):
            await asyncio.get_running_loop().getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(look_up())
