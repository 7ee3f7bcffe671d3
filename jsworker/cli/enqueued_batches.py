"""The jobs that ``jsworker enqueue`` enqueues in batches: their ids are printed, and how many there are."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jsworker.cli.interruption import on_interrupt
from jsworker.cli.output import json_text, print_stored, remark
from jsworker.client.enqueueing import Kind
from jsworker.client.job_client import JobClient
from jsworker.core.errors import DatabaseUnavailable, LockTimeout
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.enqueue import Enqueued


class JobBatch(NamedTuple):
    """Payloads, their unique keys if they have any, and the part of the progress that they are."""

    payloads: Sequence[Any]
    keys: Sequence[str | None] | None
    progress: int


class EnqueuedBatches:
    """Enqueues batches and prints the ids of each, or those of all at the end as JSON."""

    def __init__(self, total: int, *, as_json: bool) -> None:
        self._total = total
        self._as_json = as_json
        self._shown: list[Enqueued] = []
        self._created = self._existed = self._unclear = 0

    async def enqueue(
        self,
        kind: Kind,
        batches: Iterable[JobBatch],
        options: dict[str, Any],
        advance: Callable[[int], None],
    ) -> None:
        """Enqueue the batches, and say so if some are not published yet.

        Raises asyncio.CancelledError if Ctrl-C was pressed, after the batch that was under way.
        """
        async with JobClient.from_env() as client:
            interrupted = on_interrupt("what is enqueued stays enqueued")
            for batch in batches:
                try:
                    answers = await client.enqueue_many(
                        kind, batch.payloads, unique_keys=batch.keys, **options
                    )
                except (DatabaseUnavailable, LockTimeout, RowRefused, asyncio.CancelledError):
                    # It takes several statements, some of which may have been committed.
                    self._unclear = len(batch.payloads)
                    raise
                self._take(answers)
                advance(batch.progress)
                if interrupted.is_set():
                    raise asyncio.CancelledError
            await client.publish_pending()
        remark_unpublished(client, options)

    def report(self) -> None:
        """Print what is left to print, and say how many jobs were enqueued unless all are new."""
        if self._as_json:
            print_stored(json_text([{"id": each.id, "created": each.created} for each in self._shown]))
        parts = [f"{self._created} of {self._total} jobs were enqueued"]
        if self._unclear:
            parts.append(f"of the next {self._unclear} perhaps some")
        if self._existed:
            parts.append(f"{self._existed} existed already")
        if self._created < self._total:
            remark("; ".join(parts))

    def _take(self, batch: Sequence[Enqueued]) -> None:
        created = sum(each.created for each in batch)
        self._created += created
        self._existed += len(batch) - created
        if self._as_json:
            self._shown.extend(batch)
        else:
            print_stored("\n".join(str(each.id) for each in batch))


def remark_unpublished(client: JobClient, options: dict[str, Any]) -> None:
    """Say why jobs that are due were not published, which a worker does then."""
    unpublished = client.unpublished_because
    if unpublished and not (options["delay"] or options["run_at"] or options["debounce"]):
        remark(f"stored, but not published yet, which a worker does: {unpublished}")
