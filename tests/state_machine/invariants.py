"""The invariants of the protocol, read from two consecutive states of the table and from nothing else."""

from collections.abc import Callable, Collection, Iterator
from uuid import UUID

from .world import Row, Rows

Right = Callable[[Row], bool]
"""Whether a step has the right to end the run of a row, as that row was before."""

_FINAL = ("completed", "failed", "cancelled")


def violations(
    before: Rows, after: Rows, *, rights: Collection[Right] = (), retried: UUID | None = None
) -> Iterator[str]:
    """Return every invariant that a step has broken.

    Args:
        before: the rows before the step.
        after: the rows after it.
        rights: by which the step may end the run of a row.
        retried: the job that an operator's RETRY put back into the queue in this step.
    """
    for job_id in before.keys() - after.keys():
        yield f"S7 job {job_id} is gone"
    for job_id, row in after.items():
        yield from _of_one(row)
        if job_id in before:
            yield from _of_two(before[job_id], row, rights, retried=job_id == retried)


def _of_one(row: Row) -> Iterator[str]:
    name = f"job {row['id']}"
    processing = row["status"] == "processing"
    if (row["worker_id"] is not None) != processing:
        yield f"S4 {name} is {row['status']} and its owner is {row['worker_id']}"
    if (row["last_activity_at"] is not None) != processing:
        yield f"S4 {name} is {row['status']} and its last activity is {row['last_activity_at']}"
    if (row["finished_at"] is not None) != (row["status"] in _FINAL):
        yield f"S4 {name} is {row['status']} and finished at {row['finished_at']}"
    ended_otherwise = row["status"] in ("completed", "processing")
    if row["attempts"] != row["errors"] + row["stalls"] + ended_otherwise:
        counts = f"{row['attempts']} attempts, {row['errors']} errors, {row['stalls']} stalls"
        yield f"S6 {name} is {row['status']} with {counts}"
    if row["needs_publish"] and row["status"] != "queued":
        yield f"S7 {name} is {row['status']} and needs a message"
    for counter, limit in (("errors", "max_attempts"), ("stalls", "max_stalls")):
        if row[limit] is not None and row[counter] > row[limit]:
            yield f"S8 {name} has {row[counter]} {counter} of {row[limit]}"


def _of_two(before: Row, after: Row, rights: Collection[Right], *, retried: bool) -> Iterator[str]:
    name = f"job {after['id']}"
    by_retry = retried and before["status"] == "failed" and after["status"] == "queued"
    if before["status"] in _FINAL and _changed(before, after) and not by_retry:
        yield f"S1 {name} was {before['status']} and has changed: {_changed(before, after)}"
    for column in ("fencing_token", "dispatch"):
        if after[column] < before[column]:
            yield f"S3 {name}: {column} went from {before[column]} to {after[column]}"
    new_owner = after["worker_id"] is not None and after["worker_id"] != before["worker_id"]
    if new_owner and after["fencing_token"] != before["fencing_token"] + 1:
        yield f"S3 {name}: {after['worker_id']} owns it with token {after['fencing_token']}"
    ended = before["status"] == "processing" and (
        after["status"] != "processing" or after["fencing_token"] != before["fencing_token"]
    )
    if ended and not any(right(before) for right in rights):
        yield f"S5 {name}: the run of {before['worker_id']} was ended by no statement that may"


def _changed(before: Row, after: Row) -> str:
    changed = [column for column in before if column != "now" and before[column] != after[column]]
    return ", ".join(f"{column} {before[column]} -> {after[column]}" for column in changed)
