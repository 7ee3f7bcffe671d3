"""The invariants of the protocol, read from two consecutive states of the table and from nothing else."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from uuid import UUID

from .world import Row, Rows

Right = Callable[[Row], bool]
"""Whether a step has the right to end the run of a row, as that row was before."""

ADMISSION = ("limit", "rate", "paused")
"""By what admission holds a job."""
_FINAL = ("completed", "failed", "cancelled")


def violations(
    before: Rows, after: Rows, *, rights: Collection[Right] = (), retried: Collection[UUID] = ()
) -> Iterator[str]:
    """Return every invariant that a step has broken.

    Args:
        before: the rows before the step.
        after: the rows after it.
        rights: by which the step may end the run of a row.
        retried: the jobs that an operator's RETRY brought back in this step.
    """
    for job_id in before.keys() - after.keys():
        yield f"S7 job {job_id} is gone"
    for job_id, row in after.items():
        yield from _of_one(row)
        if job_id in before:
            yield from _of_two(before[job_id], row, rights, retried=job_id in retried)


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
    if row["status"] == "scheduled" and (row["run_at"] is None) == (row["held_by"] is None):
        yield f"S4 {name} is scheduled for {row['run_at']} and held by {row['held_by']}"
    if row["held_by"] is not None and row["status"] != "scheduled":
        yield f"S4 {name} is {row['status']} and held by {row['held_by']}"
    for counter, limit in (("errors", "max_attempts"), ("stalls", "max_stalls")):
        if row[limit] is not None and row[counter] > row[limit]:
            yield f"S8 {name} has {row[counter]} {counter} of {row[limit]}"


def _of_two(before: Row, after: Row, rights: Collection[Right], *, retried: bool) -> Iterator[str]:
    name = f"job {after['id']}"
    by_retry = retried and before["status"] in ("failed", "cancelled")
    if before["status"] in _FINAL and _changed(before, after) and not by_retry:
        yield f"S1 {name} was {before['status']} and has changed: {_changed(before, after)}"
    for column in ("fencing_token", "dispatch"):
        if after[column] < before[column]:
            yield f"S3 {name}: {column} went from {before[column]} to {after[column]}"
    if before["queued_at"] is not None and _keeps_place(before, after):
        moved = before["queued_at"] != after["queued_at"] or before["priority"] != after["priority"]
        if moved:
            yield f"L3 {name} lost its place: {before['queued_at']} -> {after['queued_at']}"
    new_owner = after["worker_id"] is not None and after["worker_id"] != before["worker_id"]
    if new_owner and after["fencing_token"] != before["fencing_token"] + 1:
        yield f"S3 {name}: {after['worker_id']} owns it with token {after['fencing_token']}"
    ended = before["status"] == "processing" and (
        after["status"] != "processing" or after["fencing_token"] != before["fencing_token"]
    )
    if ended and not any(right(before) for right in rights):
        yield f"S5 {name}: the run of {before['worker_id']} was ended by no statement that may"


def _keeps_place(before: Row, after: Row) -> bool:
    """Tell whether a job was held, woken, or claimed where it was held."""
    was_held = before["held_by"] in ADMISSION and after["status"] in ("queued", "processing")
    return was_held or (before["status"] == "queued" and after["held_by"] in ADMISSION)


def flow_violations(
    before: Rows, after: Rows, batches: tuple[Rows, Rows], most: Mapping[str, int]
) -> Iterator[str]:
    """Return every invariant of admission, schedules and workflows that a step has broken.

    Args:
        before, after: the rows of jobs.
        batches: those of batches, before and after.
        most: how many of each key may run.
    """
    running = Counter(row["limit_key"] for row in after.values() if row["status"] == "processing")
    for row in after.values():
        was = before[row["id"]]["status"] if row["id"] in before else None
        if row["status"] == "processing" != was and running[row["limit_key"]] > most[row["limit_key"]]:
            yield f"A1 {running[row['limit_key']]} run of key {row['limit_key']!r}"
    instants = Counter((row["schedule"], row["scheduled_for"]) for row in after.values() if row["schedule"])
    yield from (f"A2 {count} jobs of {instant}" for instant, count in instants.items() if count > 1)
    of_before, of_after = batches
    live = {row["batch_id"] for row in after.values() if row["status"] not in _FINAL}
    for batch_id, batch in of_after.items():
        if batch["finished_at"] is not None and batch_id in live:
            yield f"A3 batch {batch['name']} has finished and has a live member"
        was_finished = batch_id in of_before and of_before[batch_id]["finished_at"]
        same = was_finished and of_before[batch_id]["generation"] == batch["generation"]
        if same and batch["finished_at"] != was_finished:
            yield f"A3 batch {batch['name']} finished at {was_finished}, and at {batch['finished_at']}"


def _changed(before: Row, after: Row) -> str:
    changed = [column for column in before if column != "now" and before[column] != after[column]]
    return ", ".join(f"{column} {before[column]} -> {after[column]}" for column in changed)
