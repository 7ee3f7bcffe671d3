"""Every guarded statement, a row that may take it, and for each predicate of its guard a row that may not.

A ``Flip`` changes a row that fulfils the whole guard so that one predicate fails and all others still hold;
the tests read it in both directions: the statement refuses the flipped row, and the same statement without
that predicate takes it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause

from jsworker.ownership import claim, control, lease, outbox, repair, reset, settle
from jsworker.ownership.enqueue import new_job_id

from .rows import KIND, OTHER_WORKER, STATES, WORKER, ago, seconds

Row = Mapping[str, Any]
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Flip:
    """One predicate made false.

    Attributes:
        predicate: its name, for people.
        pattern: where it stands in the SQL, every time it is repeated (a regular expression).
        columns: what the row holds instead, set after the statement's values were chosen.
        parameters: what the statement is given instead, for that row.
    """

    predicate: str
    pattern: str
    columns: Row = field(default_factory=dict)
    parameters: Callable[[Row], Parameters] = lambda _: {}


@dataclass(frozen=True)
class Transition:
    """A guarded statement.

    Attributes:
        name: as in the protocol.
        statement: the SQL under test.
        status, columns: a row that fulfils the guard.
        parameters: the statement's values for that row.
        flips: its guard, predicate by predicate.
        writes: False for the reads that decide what is written next.
        names_rows: False for the sweeps, which take whatever is due.
        tells: what the statement itself writes to the timeline when it is refused.
    """

    name: str
    statement: TextClause
    status: str
    parameters: Callable[[Row], Parameters]
    flips: list[Flip]
    columns: Row = field(default_factory=dict)
    writes: bool = True
    names_rows: bool = True
    tells: str | None = None


def statuses(pattern: str, *allowed: str) -> list[Flip]:
    """Return one flip for each status that the guard does not allow; nothing else of the row changes."""
    return [
        Flip(f"status={status}", pattern, {"status": status}) for status in STATES if status not in allowed
    ]


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


def _hand(job: Row) -> Parameters:
    return {"worker_id": WORKER, "ids": [job["id"]], "tokens": [job["fencing_token"]]}


def _settling(
    parameters: Callable[[Any], Parameters], run: Callable[[UUID, int], object]
) -> Callable[[Row], Parameters]:
    return lambda job: {"worker_id": WORKER} | parameters([run(job["id"], job["fencing_token"])])


_complete = _settling(settle._completions, lambda job_id, token: settle.Completion(job_id, token, "{}"))
_fail = _settling(settle._failures, lambda job_id, token: settle.Failure(job_id, token, "broken", None, 1.0))
_release = _settling(settle._returns, lambda job_id, token: settle.Return(job_id, token, "shutdown"))

_BATCH_TOKEN = r"j\.fencing_token = (hand|input|h)\.token"
_TOKEN = r"fencing_token = :token"
_SEEN_TOKEN = r"j\.fencing_token = seen\.token"
_QUEUED = r"(j\.)?status = 'queued'"
_LIVE = r"(j\.)?status IN \('scheduled', 'queued', 'processing'\)"
_SEEN_ACTIVITY = r"j\.last_activity_at = seen\.activity"
_STALE = r"j\.last_activity_at \+ j\.stale_after < clock_timestamp\(\)"
_CRASHED = r"j\.last_activity_at \+ j\.crash_after < clock_timestamp\(\)"
_OLDER = r"j\.queued_at < statement_timestamp\(\)[^\n]+"
_TO_PUBLISH = r"CAST\(needs_publish AS integer\) = 1|j\.needs_publish(?= AND)"


def _as_seen(job: Row) -> Parameters:
    return {"ids": [job["id"]], "tokens": [job["fencing_token"]], "activities": [job["last_activity_at"]]}


def _seen(beyond: str, column: str) -> list[Flip]:
    """Return the flips of a row that must be as it was seen, and silent beyond a threshold of its own."""
    return [
        *statuses(r"j\.status = 'processing'", "processing"),
        Flip("newer token", _SEEN_TOKEN, {"fencing_token": 2}),
        Flip("older token", _SEEN_TOKEN, {"fencing_token": 0}),
        Flip("activity as seen", _SEEN_ACTIVITY, {"last_activity_at": ago(50)}),
        Flip("no activity", f"{_SEEN_ACTIVITY}|{beyond}", {"last_activity_at": None}),
        Flip("beyond the threshold", beyond, {column: seconds(90)}),
        Flip("no threshold", beyond, {column: None}),
    ]


def _claiming(kind: str = KIND) -> Parameters:
    return {
        "worker_id": WORKER,
        "kind": kind,
        "stale_after": 30.0,
        "crash_after": 15.0,
        "timeout": None,
        "max_attempts": 3,
        "max_stalls": 3,
    }


TRANSITIONS = [
    Transition(
        "PUBLISH",
        outbox.PUBLISH,
        "queued",
        lambda _: {"limit": 10},
        [
            *statuses(_QUEUED, "queued"),
            Flip("needs_publish", _TO_PUBLISH, {"needs_publish": False}),
            Flip("publish_after", r"(j\.)?publish_after <= clock_timestamp\(\)", {"publish_after": ago(-60)}),
        ],
        columns={"needs_publish": True},
        names_rows=False,
    ),
    Transition(
        "MARK",
        outbox.MARK,
        "queued",
        lambda job: {"ids": [job["id"]], "dispatches": [job["dispatch"]], "seqs": [7], "created": [None]},
        [
            *statuses(_QUEUED, "queued"),
            Flip("needs_publish", r"j\.needs_publish(?= AND)", {"needs_publish": False}),
            Flip("newer dispatch", r"j\.dispatch = \w+\.dispatch", {"dispatch": 2}),
            Flip("older dispatch", r"j\.dispatch = \w+\.dispatch", {"dispatch": 0}),
        ],
        columns={"needs_publish": True},
    ),
    Transition(
        "PROMOTE",
        outbox.PROMOTE,
        "scheduled",
        lambda _: {"limit": 10},
        [
            *statuses(r"status \|\| '' = 'scheduled'|j\.status = 'scheduled'", "scheduled"),
            Flip("run_at", r"(j\.)?run_at <= clock_timestamp\(\)", {"run_at": ago(-60)}),
        ],
        columns={"run_at": ago(1)},
        names_rows=False,
    ),
    Transition(
        "CLAIM",
        claim.CLAIM,
        "queued",
        lambda job: _claiming() | {"ids": [job["id"]]},
        [
            *statuses(_QUEUED, "queued"),
            Flip("kind", r"j\.kind = :kind", {"kind": "other-kind"}),
        ],
    ),
    Transition(
        "CLAIM of a stale owner's job",
        claim.CLAIM_STALE,
        "processing",
        lambda job: _claiming() | _as_seen(job),
        [
            *_seen(_STALE, "stale_after"),
            Flip("kind", r"j\.kind = :kind", {"kind": "other-kind"}),
            Flip("first stall", r"j\.stalls = 0", {"stalls": 1}),
            Flip("a further run is due", r"j\.max_stalls >= 2", {"max_stalls": 1}),
            Flip("limit of stalls", r"j\.max_stalls >= 2", {"max_stalls": None}),
            Flip("no cancel", r"NOT j\.cancel_requested", {"cancel_requested": True}),
        ],
        columns={"last_activity_at": ago(60), "worker_id": OTHER_WORKER},
    ),
    Transition(
        "READ BACK",
        claim.READ_BACK,
        "processing",
        lambda job: {"worker_id": WORKER, "ids": [job["id"]]},
        [
            *statuses(r"j\.status = 'processing'", "processing"),
            Flip("worker", r"j\.worker_id = :worker_id", {"worker_id": OTHER_WORKER}),
        ],
        writes=False,
    ),
    Transition("HEARTBEAT", lease.HEARTBEAT, "processing", _hand, _mine(_BATCH_TOKEN)),
    Transition(
        "STILL MINE",
        lease.STILL_MINE,
        "processing",
        _hand,
        [flip for flip in _mine(_BATCH_TOKEN) if flip.predicate != "status=completed"],
        writes=False,
    ),
    Transition(
        "COMPLETED BY ME",
        lease.STILL_MINE,
        "completed",
        _hand,
        [
            *statuses(r"j\.status = 'completed'", "completed"),
            Flip("newer token", _BATCH_TOKEN, {"fencing_token": 2}),
            Flip("older token", _BATCH_TOKEN, {"fencing_token": 0}),
        ],
        writes=False,
    ),
    Transition("HEARTBEAT alone", lease.HEARTBEAT_ALONE, "processing", _held, _mine(_TOKEN)),
    Transition(
        "PROGRESS",
        lease.PROGRESS,
        "processing",
        lambda job: _held(job) | {"stage": "clone", "progress": 0.5, "message": "half", "write": "progress"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "CHECKPOINT",
        lease.CHECKPOINT,
        "processing",
        lambda job: _held(job) | {"checkpoint": "[1]", "write": "checkpoint"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "QUIET",
        lease.QUIET,
        "processing",
        lambda job: _held(job) | {"stale_after": 90.0, "crash_after": 75.0, "write": "quiet"},
        _mine(_TOKEN),
        tells="rejected",
    ),
    Transition(
        "STRAYS",
        lease.STRAYS,
        "processing",
        lambda _: {"worker_id": WORKER, "ids": [], "tokens": [], "claiming": [], "older_than": 6.0},
        [
            *statuses(r"j\.status \|\| '' = 'processing'", "processing"),
            Flip("worker", r"j\.worker_id = :worker_id", {"worker_id": OTHER_WORKER}),
            Flip("age of the claim", r"j\.claimed_at < [^\n]+", {"claimed_at": ago(1)}),
            Flip(
                "not being claimed", r"j\.id <> ALL[^\n]+", parameters=lambda job: {"claiming": [job["id"]]}
            ),
            Flip("not in hand", r"NOT EXISTS \([^;]+?h\.token = j\.fencing_token\)", parameters=_hand),
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
    *(
        Transition(
            f"RESET {cause}",
            statement,
            "processing",
            lambda job: {"worker_id": OTHER_WORKER, "reason": "silent", "counted": True} | _as_seen(job),
            _seen(threshold, column),
            columns={"last_activity_at": ago(60)},
        )
        for cause, statement, threshold, column in (
            ("stale", reset.RESET_STALE, _STALE, "stale_after"),
            ("crashed", reset.RESET_CRASHED, _CRASHED, "crash_after"),
        )
    ),
    Transition(
        "RESET dead",
        reset.RESET_DEAD,
        "processing",
        lambda _: {
            "worker_id": OTHER_WORKER,
            "owner": WORKER,
            "reason": "killed",
            "counted": True,
            "culprits": [],
            "ids": None,
            "limit": 500,
        },
        [
            *statuses(r"j\.status( \|\| '')? = 'processing'", "processing"),
            Flip("owner", r"j\.worker_id = :owner", {"worker_id": OTHER_WORKER}),
            Flip("no owner", r"j\.worker_id = :owner", {"worker_id": None}),
            Flip("named", r"\(CAST\(:ids[^\n]+", parameters=lambda _: {"ids": [new_job_id()]}),
        ],
        names_rows=False,
    ),
    Transition(
        "REPUBLISH",
        repair.REPUBLISH,
        "queued",
        lambda job: {"worker_id": WORKER, "ids": [job["id"]], "dispatches": [job["dispatch"]]},
        [
            *statuses(_QUEUED, "queued"),
            Flip("published", r"NOT j\.needs_publish", {"needs_publish": True}),
            Flip("newer dispatch", r"j\.dispatch = gone\.dispatch", {"dispatch": 2}),
            Flip("older dispatch", r"j\.dispatch = gone\.dispatch", {"dispatch": 0}),
        ],
    ),
    Transition(
        "WAITING",
        repair.WAITING,
        "queued",
        lambda _: {"kinds": [KIND], "older_than": 30.0, "limit": 10, "besides": []},
        [
            *statuses(r"j\.status \|\| '' = 'queued'", "queued"),
            Flip("kind", r"j\.kind = k\.kind", {"kind": "other-kind"}),
            Flip("age", _OLDER, {"queued_at": ago(10)}),
            Flip("besides", r"id <> ALL\(.+?\]\)\)", parameters=lambda job: {"besides": [job["id"]]}),
        ],
        columns={"queued_at": ago(60)},
        writes=False,
        names_rows=False,
    ),
    Transition(
        "POSTED",
        repair.POSTED,
        "queued",
        lambda _: {
            "kinds": [KIND],
            "older_than": 30.0,
            "limit": 10,
            "after": "-infinity",
            "after_id": UUID(int=0),
        },
        [
            *statuses(r"j\.status \|\| '' = 'queued'", "queued"),
            Flip("published", r"NOT needs_publish", {"needs_publish": True}),
            Flip("age", _OLDER, {"queued_at": ago(10)}),
            Flip("kind", r"\(CAST\(:kinds[^\n]+", parameters=lambda _: {"kinds": ["other-kind"]}),
        ],
        columns={"queued_at": ago(60)},
        writes=False,
        names_rows=False,
    ),
    Transition(
        "RESET by operator",
        reset.RESET_BY_OPERATOR,
        "processing",
        lambda job: {
            "worker_id": None,
            "reason": "by hand",
            "ids": [job["id"]],
            "tokens": [job["fencing_token"]],
        },
        [
            *statuses(r"j\.status = 'processing'", "processing"),
            Flip("newer token", _SEEN_TOKEN, {"fencing_token": 2}),
            Flip("older token", _SEEN_TOKEN, {"fencing_token": 0}),
        ],
    ),
    *(
        Transition(
            f"CANCEL {status}",
            control.CANCEL,
            status,
            lambda job: {"ids": [job["id"]]},
            statuses(_LIVE, "scheduled", "queued", "processing"),
        )
        for status in ("scheduled", "queued", "processing")
    ),
    Transition(
        "RETRY",
        control.RETRY,
        "failed",
        lambda job: {"id": job["id"]},
        statuses(r"(j\.)?status = 'failed'", "failed"),
    ),
]


def flips() -> Iterator[tuple[Transition, Flip]]:
    """Return every predicate of every guard."""
    for transition in TRANSITIONS:
        for flip in transition.flips:
            yield transition, flip
