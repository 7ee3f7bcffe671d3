"""The guards of an owner's own writes: ``mine`` is processing, my worker id, my fencing token."""

from sqlalchemy import ColumnElement, Uuid, all_, bindparam

from jsworker.ownership.predicates import (
    claimed_before,
    completed,
    processing,
    processing_indexed,
    progress_as_seen,
    worker_id,
)
from jsworker.ownership.statements import given_array, given_runs, j
from jsworker.ownership.transitions import heartbeat, settle, snooze, steps

from .rows import OTHER_WORKER, WORKER, ago
from .transitions import Flip, Parameters, Row, Transition, statuses

_TOKEN = j.c.fencing_token == bindparam("token")
_BATCH_TOKEN = j.c.fencing_token == given_runs("run").c.token
_BEING_CLAIMED = j.c.id != all_(given_array("claiming", Uuid))
_IN_FLIGHT = r"NOT \(EXISTS \([^;]+?j\.fencing_token = run\.token\)\)"
_WORKER = j.c.worker_id == worker_id
_ACTIVITY = r"j\.last_activity_at = \w+\.activity"


def _mine(token: ColumnElement[bool]) -> list[Flip]:
    return [
        *statuses(processing, "processing"),
        Flip("worker", _WORKER, {"worker_id": OTHER_WORKER}),
        Flip("no worker", _WORKER, {"worker_id": None}),
        Flip("newer token", token, {"fencing_token": 2}),
        Flip("older token", token, {"fencing_token": 0}),
    ]


_IN_ORDER = Flip("progress as seen", progress_as_seen, {"progress_at": ago(1)}, tells=False)
_NO_PROGRESS_SEEN = Flip("progress seen", progress_as_seen, parameters=lambda _: {"seen": None}, tells=False)


def _held(job: Row) -> Parameters:
    return {"worker_id": WORKER, "id": job["id"], "token": job["fencing_token"]}


def _seen(job: Row) -> Parameters:
    return {"seen": job["progress_at"]}


def _in_flight(job: Row) -> Parameters:
    return {"worker_id": WORKER, "ids": [job["id"]], "tokens": [job["fencing_token"]]}


def _complete(job: Row) -> Parameters:
    return settle.complete.values(WORKER, [settle.Completion(job["id"], job["fencing_token"], "{}")])


def _fail(job: Row) -> Parameters:
    return settle.fail.values(WORKER, [settle.Failure(job["id"], job["fencing_token"], "broken", None, 1.0)])


def _release(job: Row) -> Parameters:
    return settle.release.values(WORKER, [settle.Return(job["id"], job["fencing_token"], "shutdown")])


def _snooze(job: Row) -> Parameters:
    snoozing = settle.Snoozing(job["id"], job["fencing_token"], "not yet", 60.0, 1000, "too often")
    return snooze.snooze.values(WORKER, [snoozing])


OWNER = [
    Transition("HEARTBEAT", heartbeat.HEARTBEAT, "processing", _in_flight, _mine(_BATCH_TOKEN)),
    Transition(
        "STILL MINE",
        heartbeat.STILL_MINE,
        "processing",
        _in_flight,
        [flip for flip in _mine(_BATCH_TOKEN) if flip.predicate != "status=completed"],
        writes=False,
    ),
    Transition(
        "COMPLETED BY ME",
        heartbeat.STILL_MINE,
        "completed",
        _in_flight,
        [
            *statuses(completed, "completed"),
            Flip("newer token", _BATCH_TOKEN, {"fencing_token": 2}),
            Flip("older token", _BATCH_TOKEN, {"fencing_token": 0}),
            Flip("worker", j.c.completed_by == worker_id, {"completed_by": OTHER_WORKER}),
        ],
        columns={"completed_by": WORKER},
        writes=False,
    ),
    Transition("HEARTBEAT alone", heartbeat.HEARTBEAT_ALONE, "processing", _in_flight, _mine(_BATCH_TOKEN)),
    Transition(
        "PROGRESS",
        heartbeat.PROGRESS,
        "processing",
        lambda job: _held(job) | {"stage": "clone", "progress": 0.5, "message": "half", "write": "progress"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "CHECKPOINT",
        heartbeat.CHECKPOINT,
        "processing",
        lambda job: _held(job) | _seen(job) | {"checkpoint": "[1]", "write": "checkpoint"},
        [*_mine(_TOKEN), _IN_ORDER, _NO_PROGRESS_SEEN],
        columns={"progress_at": ago(60)},
        tells="rejected",
    ),
    Transition(
        "QUIET",
        heartbeat.QUIET,
        "processing",
        lambda job: _held(job) | _seen(job) | {"stale_after": 90.0, "crash_after": 75.0, "write": "quiet"},
        [*_mine(_TOKEN), _IN_ORDER, _NO_PROGRESS_SEEN],
        columns={"progress_at": ago(60)},
        tells="rejected",
    ),
    Transition(
        "QUIET BESIDE",
        heartbeat.QUIET_BESIDE,
        "processing",
        lambda job: _in_flight(job) | {"stale_after": [90.0], "crash_after": [75.0]},
        _mine(_BATCH_TOKEN),
    ),
    Transition(
        "QUIET OVER",
        heartbeat.QUIET_OVER,
        "processing",
        lambda job: (
            _in_flight(job)
            | {"stale_after": [30.0], "crash_after": [15.0], "activities": [job["last_activity_at"]]}
        ),
        [*_mine(_BATCH_TOKEN), Flip("activity as seen", _ACTIVITY, {"last_activity_at": ago(50)})],
    ),
    Transition(
        "ORPHANED",
        heartbeat.ORPHANED,
        "processing",
        lambda _: {"worker_id": WORKER, "ids": [], "tokens": [], "claiming": [], "older_than": 6.0},
        [
            *statuses(processing_indexed, "processing"),
            Flip("worker", _WORKER, {"worker_id": OTHER_WORKER}),
            Flip("age of the claim", claimed_before, {"claimed_at": ago(1)}),
            Flip("not being claimed", _BEING_CLAIMED, parameters=lambda job: {"claiming": [job["id"]]}),
            Flip("not in flight", _IN_FLIGHT, parameters=_in_flight),
        ],
        columns={"claimed_at": ago(60)},
        writes=False,
        names_rows=False,
    ),
    Transition("COMPLETE", settle.COMPLETE, "processing", _complete, _mine(_BATCH_TOKEN)),
    Transition("COMPLETE alone", settle.complete.alone, "processing", _complete, _mine(_BATCH_TOKEN)),
    Transition("FAIL", settle.FAIL, "processing", _fail, _mine(_BATCH_TOKEN)),
    Transition("FAIL alone", settle.fail.alone, "processing", _fail, _mine(_BATCH_TOKEN)),
    Transition("RELEASE", settle.RELEASE, "processing", _release, _mine(_BATCH_TOKEN)),
    Transition("RELEASE alone", settle.release.alone, "processing", _release, _mine(_BATCH_TOKEN)),
    Transition(
        "STEP",
        steps.STEP,
        "processing",
        lambda job: _held(job) | {"name": "charge", "result": "[1]", "sleeps": None, "write": "step"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "STEP FOUND",
        steps.FOUND,
        "processing",
        lambda job: _held(job) | {"name": "charge"},
        _mine(_TOKEN),
        writes=False,
    ),
    Transition("SNOOZE", snooze.SNOOZE, "processing", _snooze, _mine(_BATCH_TOKEN)),
    Transition("SNOOZE alone", snooze.snooze.alone, "processing", _snooze, _mine(_BATCH_TOKEN)),
]
