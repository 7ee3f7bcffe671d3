"""The guards of an owner's own writes: ``mine`` is processing, my worker id, my fencing token."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from jsworker.ownership.transitions import heartbeat, settle

from .rows import OTHER_WORKER, WORKER, ago
from .transitions import Flip, Parameters, Row, Transition, statuses

_BATCH_TOKEN = r"j\.fencing_token = (hand|input|h)\.token"
_TOKEN = r"fencing_token = :token"


def _mine(pattern_of_token: str) -> list[Flip]:
    return [
        *statuses(r"(j\.)?status = 'processing'", "processing"),
        Flip("worker", r"(j\.)?worker_id = :worker_id", {"worker_id": OTHER_WORKER}),
        Flip("no worker", r"(j\.)?worker_id = :worker_id", {"worker_id": None}),
        Flip("newer token", pattern_of_token, {"fencing_token": 2}),
        Flip("older token", pattern_of_token, {"fencing_token": 0}),
    ]


def _held(job: Row) -> Parameters:
    return {"worker_id": WORKER, "id": job["id"], "token": job["fencing_token"]}


def _in_flight(job: Row) -> Parameters:
    return {"worker_id": WORKER, "ids": [job["id"]], "tokens": [job["fencing_token"]]}


def _settling(
    parameters: Callable[[Any], Parameters], run: Callable[[UUID, int], object]
) -> Callable[[Row], Parameters]:
    return lambda job: {"worker_id": WORKER} | parameters([run(job["id"], job["fencing_token"])])


_complete = _settling(settle._completions, lambda job_id, token: settle.Completion(job_id, token, "{}"))
_fail = _settling(settle._failures, lambda job_id, token: settle.Failure(job_id, token, "broken", None, 1.0))
_release = _settling(settle._returns, lambda job_id, token: settle.Return(job_id, token, "shutdown"))

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
            *statuses(r"j\.status = 'completed'", "completed"),
            Flip("newer token", _BATCH_TOKEN, {"fencing_token": 2}),
            Flip("older token", _BATCH_TOKEN, {"fencing_token": 0}),
        ],
        writes=False,
    ),
    Transition("HEARTBEAT alone", heartbeat.HEARTBEAT_ALONE, "processing", _held, _mine(_TOKEN)),
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
        lambda job: _held(job) | {"checkpoint": "[1]", "write": "checkpoint"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "QUIET",
        heartbeat.QUIET,
        "processing",
        lambda job: (
            _held(job) | {"stale_after": 90.0, "crash_after": 75.0, "announced": True, "write": "quiet"}
        ),
        _mine(_TOKEN),
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
        "STRAYS",
        heartbeat.STRAYS,
        "processing",
        lambda _: {"worker_id": WORKER, "ids": [], "tokens": [], "claiming": [], "older_than": 6.0},
        [
            *statuses(r"j\.status \|\| '' = 'processing'", "processing"),
            Flip("worker", r"j\.worker_id = :worker_id", {"worker_id": OTHER_WORKER}),
            Flip("age of the claim", r"j\.claimed_at < [^\n]+", {"claimed_at": ago(1)}),
            Flip(
                "not being claimed", r"j\.id <> ALL[^\n]+", parameters=lambda job: {"claiming": [job["id"]]}
            ),
            Flip("not in hand", r"NOT EXISTS \([^;]+?h\.token = j\.fencing_token\)", parameters=_in_flight),
        ],
        columns={"claimed_at": ago(60)},
        writes=False,
        names_rows=False,
    ),
    Transition("COMPLETE", settle.COMPLETE, "processing", _complete, _mine(_BATCH_TOKEN)),
    Transition("COMPLETE alone", settle._COMPLETE.alone, "processing", _complete, _mine(_BATCH_TOKEN)),
    Transition("FAIL", settle.FAIL, "processing", _fail, _mine(_BATCH_TOKEN)),
    Transition("FAIL alone", settle._FAIL.alone, "processing", _fail, _mine(_BATCH_TOKEN)),
    Transition("RELEASE", settle.RELEASE, "processing", _release, _mine(_BATCH_TOKEN)),
    Transition("RELEASE alone", settle._RELEASE.alone, "processing", _release, _mine(_BATCH_TOKEN)),
]
