"""Messages that nobody of ours sent, messages twice, and a producer that dies before it could send any."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from uuid import uuid4

from nats.aio.msg import Msg

from jsworker.core.clock import boottime
from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.nemeses.producers import producer_killed
from tests.faults.stores import PREFIX, STREAM

_SECONDS = 5.0
_LONGEST_SECONDS = 120.0
_PER_SECOND = 10
_KIND = "ordinary"


async def forged_messages(field: Battlefield) -> None:
    """Ten messages a second that lie, or say nothing that can be read."""
    known = "SELECT id::text, dispatch, status FROM jsworker.jobs WHERE kind = %s ORDER BY random() LIMIT 20"
    async with field.fault("forged_messages", "messages") as fault, field.stores.connected_to_nats() as nats:
        for number in range(int(_SECONDS * _PER_SECOND)):
            rows = await field.stores.execute(known, _KIND)
            forgeries = list(_forgeries([(str(row[0]), int(str(row[1]))) for row in rows]))
            await nats.publish(f"{PREFIX}.{_KIND}", forgeries[number % len(forgeries)])
            await asyncio.sleep(1 / _PER_SECOND)
        await nats.flush()
        fault.fired = True


async def doubled_messages(field: Battlefield) -> None:
    """The messages of running and of waiting jobs once more, without a message id."""
    live = "SELECT id::text, dispatch FROM jsworker.jobs WHERE kind = %s AND finished_at IS NULL LIMIT 30"
    async with field.fault("doubled_messages", "messages") as fault, field.stores.connected_to_nats() as nats:
        fault.fired = False
        for _ in range(6):
            for job, dispatch in await field.stores.execute(live, _KIND):
                await nats.publish(f"{PREFIX}.{_KIND}", _message(str(job), dispatch=int(str(dispatch))))
                fault.fired = True
            await nats.flush()
            await asyncio.sleep(0.5)


async def hoarded_messages(field: Battlefield) -> None:
    """A client of somebody else's takes messages beside the workers and sits on them.

    The server gives each message to the pull that has waited longest: where few come, its turn comes late.
    """
    async with field.fault("hoarded_messages", "messages") as fault, field.stores.connected_to_nats() as nats:
        pull = await nats.jetstream().pull_subscribe_bind(consumer=_KIND, stream=STREAM)
        hoard: list[Msg] = []
        started = boottime()
        while (passed := boottime() - started) < _SECONDS or (not hoard and passed < _LONGEST_SECONDS):
            with suppress(TimeoutError):  # the client raises its own, and plain ones
                hoard += await pull.fetch(10, timeout=5.0)
        await pull.unsubscribe()
        fault.fired = bool(hoard)


def _forgeries(known: list[tuple[str, int]]) -> Iterator[bytes]:
    yield b"no JSON at all"
    yield b"\xff\xfe\x00"
    yield b'{"v":1,"job_id":' + b"[" * 5000
    yield b'{"v":1,"job_id":"' + b"x" * 60000 + b'"}'
    yield _message(str(uuid4()))
    yield _message(str(uuid4()), kind="another-kind")
    yield _message(str(uuid4()), v=2)
    yield _message("no uuid")
    yield json.dumps([1, 2, 3]).encode()
    for job, dispatch in known[:5]:
        yield _message(job, dispatch=dispatch + 100)
        yield _message(job, dispatch=max(1, dispatch), cleared=True)


def _message(job: str, *, kind: str = _KIND, v: int = 1, dispatch: int = 1, cleared: bool = False) -> bytes:
    fields = {
        "v": v,
        "job_id": job,
        "kind": kind,
        "dispatch": dispatch,
        "cleared": cleared,
        "clear_reason": None,
    }
    return json.dumps(fields).encode()


NEMESES: dict[str, Nemesis] = {
    "forged_messages": forged_messages,
    "doubled_messages": doubled_messages,
    "hoarded_messages": hoarded_messages,
    "producer_killed": producer_killed,
}
