"""Full disks: the servers' data lie on small file systems of their own, which are filled up for a while."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from tests.faults.battlefield import Battlefield, Nemesis

_FULL_SECONDS = 3.0
_PIECE_BYTES = 1 << 20


async def nats_disk_full(field: Battlefield) -> None:
    """No byte is left for messages.

    nats-server 2.15.1 then stores nothing until it is started anew, room or not: an operator does so.
    """
    await _fill(field, "nats_disk_full", "nats", field.stores.nats.data, then=field.stores.nats.kill)


async def postgres_disk_full(field: Battlefield) -> None:
    """No byte is left for rows, nor for the log that would bring them back."""
    await _fill(field, "postgres_disk_full", "database", field.stores.postgres.data)


async def _fill(
    field: Battlefield, name: str, touches: str, disk: Path, *, then: Callable[[], None] | None = None
) -> None:
    async with field.fault(name, touches) as fault:
        fault.fired = await asyncio.to_thread(disk.is_mount)
        if not fault.fired:
            return  # no file systems of one's own may be mounted here
        filler = disk / "filler"
        await asyncio.to_thread(_take_all, filler)
        try:
            await asyncio.sleep(_FULL_SECONDS)
        finally:
            filler.unlink()
        if then is not None:
            await asyncio.to_thread(then)
        await asyncio.to_thread(field.stores.restart_all)


def _take_all(filler: Path) -> None:
    piece = b"\0" * _PIECE_BYTES
    with filler.open("wb", buffering=0) as file:
        while piece:
            try:
                file.write(piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece = piece[: len(piece) // 2]


NEMESES: dict[str, Nemesis] = {
    "nats_disk_full": nats_disk_full,
    "postgres_disk_full": postgres_disk_full,
}
