"""The guards of everybody who does not own the row: publishers, claimers, sweepers, operators."""

import re
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import ColumnElement, DateTime, Text, Uuid, any_, bindparam

from jsworker.ownership import predicates
from jsworker.ownership.statements import AT_START, NOW, condition, given_array, given_runs, j
from jsworker.ownership.transitions import (
    claim,
    clock_ahead,
    control,
    expire,
    limits,
    priorities,
    publish,
    republish,
    reset,
)
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.reschedule import RESCHEDULE

from .rows import HELD, KIND, OTHER_WORKER, STATES, WORKER, ago, seconds
from .transitions import Flip, Parameters, Row, Transition, statuses

_seen_rows = given_runs("seen", activity=given_array("activities", DateTime(timezone=True)))
_SEEN_TOKEN = j.c.fencing_token == _seen_rows.c.token
_SEEN_ACTIVITY = j.c.last_activity_at == _seen_rows.c.activity
_OLDER = predicates.queued_before
_WAITING = "|".join(re.escape(condition(each)) for each in (predicates.waiting_indexed, predicates.waiting))
_OVER = "|".join(re.escape(condition(j.c.expires_at <= now)) for now in (NOW, AT_START))
_HELD_BY = (
    r"(?:\(j\.status \|\| ''\)|j\.status) = 'scheduled' AND j\.held_by IN \('limit', 'rate', 'paused'\)"
)
_NEEDS_PUBLISH = r"(?<=AND )j\.needs_publish\b"


def _as_seen(job: Row) -> Parameters:
    return {
        "ids": [job["id"]],
        "tokens": [job["fencing_token"]],
        "activities": [job["last_activity_at"]],
        "uncounted": [False],
    }


def _seen(beyond: ColumnElement[bool], column: str) -> list[Flip]:
    """Return the flips of a row that must be as it was seen, and silent beyond a threshold of its own."""
    both = "|".join(re.escape(condition(each)) for each in (_SEEN_ACTIVITY, beyond))
    return [
        *statuses(predicates.processing, "processing"),
        Flip("newer token", _SEEN_TOKEN, {"fencing_token": 2}),
        Flip("older token", _SEEN_TOKEN, {"fencing_token": 0}),
        Flip("activity as seen", _SEEN_ACTIVITY, {"last_activity_at": ago(50)}),
        Flip("no activity", both, {"last_activity_at": None}),
        Flip("beyond the threshold", beyond, {column: seconds(90)}),
        Flip("no threshold", beyond, {column: None}),
    ]


def _expired() -> list[Flip]:
    return [
        *statuses(predicates.waiting, "scheduled", "queued"),
        Flip("never claimed", predicates.never_claimed, {"fencing_token": 1}),
        Flip("over", predicates.is_over, {"expires_at": ago(-60)}),
        Flip("expires", predicates.is_over, {"expires_at": None}),
    ]


_LATER = datetime(2099, 1, 1, tzinfo=UTC)
_AGE = {"stale_for": 30.0, "running_for": 30.0, "no_progress_for": 30.0}
_OLD_RUN = {"last_activity_at": ago(60), "claimed_at": ago(60), "progress_at": ago(60)}
_AGE_FLIPS = [
    Flip(name, predicate, parameters=lambda _, name=name: {name: 90.0})  # type: ignore[misc]
    for name, predicate in (
        ("stale_for", predicates.is_silent),
        ("running_for", predicates.has_run),
        ("no_progress_for", predicates.stands_still),
    )
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


NOT_OWNER = [
    Transition(
        "PUBLISH",
        publish.PUBLISH,
        "queued",
        lambda _: {"limit": 10, "within": 1e9},
        [
            *statuses(predicates.queued, "queued"),
            Flip(
                "needs_publish",
                r"CAST\(j\.needs_publish AS INTEGER\) = 1|" + _NEEDS_PUBLISH,
                {"needs_publish": False},
            ),
            Flip(
                "publish_after",
                j.c.publish_after <= AT_START,
                {"publish_after": ago(-60)},
            ),
        ],
        columns={"needs_publish": True},
        names_rows=False,
    ),
    Transition(
        "MARK",
        publish.MARK,
        "queued",
        lambda job: {"ids": [job["id"]], "dispatches": [job["dispatch"]], "seqs": [7], "created": None},
        [
            *statuses(predicates.queued, "queued"),
            Flip("needs_publish", _NEEDS_PUBLISH, {"needs_publish": False}),
            Flip("newer dispatch", r"j\.dispatch = \w+\.dispatch", {"dispatch": 2}),
            Flip("older dispatch", r"j\.dispatch = \w+\.dispatch", {"dispatch": 0}),
        ],
        columns={"needs_publish": True},
        counts=True,
    ),
    Transition(
        "PROMOTE",
        publish.PROMOTE,
        "scheduled",
        lambda _: {"limit": 10, "within": 1e9},
        [
            *statuses(r"\(j\.status \|\| ''\) = 'scheduled'|j\.status = 'scheduled'", "scheduled"),
            Flip("run_at", j.c.run_at <= AT_START, {"run_at": ago(-60)}),
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
            *statuses(predicates.queued, "queued"),
            Flip("kind", predicates.of_kind, {"kind": "other-kind"}),
            Flip("in time", predicates.may_begin, {"expires_at": ago(1)}),
            Flip("limit key", predicates.has_no_limit_key, {"limit_key": "tenant-7"}),
        ],
        columns={"expires_at": ago(-60)},
    ),
    *(
        Transition(
            f"EXPIRE {status}",
            expire.EXPIRE,
            status,
            lambda _: {"limit": 10},
            [
                *statuses(_WAITING, "scheduled", "queued"),
                Flip("never claimed", predicates.never_claimed, {"fencing_token": 1}),
                Flip("over", _OVER, {"expires_at": ago(-60)}),
                Flip("expires", _OVER, {"expires_at": None}),
            ],
            columns={"expires_at": ago(1)},
            names_rows=False,
        )
        for status in ("scheduled", "queued")
    ),
    Transition(
        "EXPIRE of a key's holder",
        expire.OVER_BY_KEY,
        "queued",
        lambda _: {"kind": KIND, "unique_keys": ["order:12"]},
        [
            *_expired(),
            Flip("kind", predicates.of_kind, {"kind": "other-kind"}),
            Flip("key", r"j\.unique_key = ANY \(.+?\)\)", {"unique_key": "order:13"}),
        ],
        columns={"expires_at": ago(1), "unique_key": "order:12"},
        writes=False,
        names_rows=False,
    ),
    Transition(
        "EXPIRE of a key's holder, in a transaction that needs the key",
        expire.EXPIRE_HOLDERS,
        "queued",
        lambda _: {"kind": KIND, "unique_keys": ["order:12"]},
        [
            *_expired(),
            Flip("kind", predicates.of_kind, {"kind": "other-kind"}),
            Flip("key", r"j\.unique_key = ANY \(.+?\)\)", {"unique_key": "order:13"}),
        ],
        columns={"expires_at": ago(1), "unique_key": "order:12"},
        names_rows=False,
    ),
    Transition(
        "EXPIRE of named rows",
        expire._EXPIRY.write,
        "queued",
        lambda job: {"ids": [job["id"]]},
        _expired(),
        columns={"expires_at": ago(1)},
    ),
    Transition(
        "BRING BACK",
        clock_ahead.BRING_BACK,
        "processing",
        lambda job: {"ids": [job["id"]]},
        [
            *statuses(predicates.live, "scheduled", "queued", "processing"),
            Flip(
                "named",
                j.c.id == any_(given_array("ids", Uuid)),
                parameters=lambda _: {"ids": [new_job_id()]},
            ),
        ],
        columns={"last_activity_at": ago(-3600)},
    ),
    Transition(
        "A held job without a key gets that of its kind",
        limits.GIVE_KEYS,
        "scheduled",
        lambda _: {},
        [
            *statuses(_HELD_BY, "scheduled"),
            Flip("held by its needs", _HELD_BY, {"held_by": "needs"}),
            Flip("not held", _HELD_BY, {"held_by": None}),
            Flip("key", predicates.has_no_limit_key, {"limit_key": "tenant-7"}),
        ],
        columns=HELD,
        names_rows=False,
    ),
    Transition(
        "CLAIM of a stale owner's job",
        claim.CLAIM_STALE,
        "processing",
        lambda job: _claiming() | _as_seen(job),
        [
            *_seen(predicates.is_stale, "stale_after"),
            Flip("kind", predicates.of_kind, {"kind": "other-kind"}),
            Flip("first stall", j.c.stalls == 0, {"stalls": 1}),
            Flip("a further run is due", j.c.max_stalls >= 2, {"max_stalls": 1}),
            Flip("limit of stalls", j.c.max_stalls >= 2, {"max_stalls": None}),
            Flip("no cancel", ~j.c.cancel_requested, {"cancel_requested": True}),
        ],
        columns={"last_activity_at": ago(60), "worker_id": OTHER_WORKER},
    ),
    Transition(
        "READ BACK",
        claim.READ_BACK,
        "processing",
        lambda job: {"worker_id": WORKER, "ids": [job["id"]]},
        [
            *statuses(predicates.processing, "processing"),
            Flip("worker", j.c.worker_id == predicates.worker_id, {"worker_id": OTHER_WORKER}),
        ],
        writes=False,
    ),
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
            ("stale", reset.RESET_STALE, predicates.is_stale, "stale_after"),
            ("crashed", reset.RESET_CRASHED, predicates.is_crashed, "crash_after"),
        )
    ),
    Transition(
        "RESET dead",
        reset.RESET_DEAD,
        "processing",
        lambda job: {
            "worker_id": OTHER_WORKER,
            "owner": WORKER,
            "reason": "killed",
            "counted": True,
            "culprits": [],
            "in_line": [],
            "ids": [job["id"]],
        },
        [
            *statuses(predicates.processing, "processing"),
            Flip("owner", j.c.worker_id == bindparam("owner"), {"worker_id": OTHER_WORKER}),
            Flip("no owner", j.c.worker_id == bindparam("owner"), {"worker_id": None}),
            Flip(
                "named",
                j.c.id == any_(given_array("ids", Uuid)),
                parameters=lambda _: {"ids": [new_job_id()]},
            ),
        ],
    ),
    Transition(
        "REPUBLISH",
        republish.REPUBLISH,
        "queued",
        lambda job: {"worker_id": WORKER, "ids": [job["id"]], "dispatches": [job["dispatch"]]},
        [
            *statuses(predicates.queued, "queued"),
            Flip("published", ~j.c.needs_publish, {"needs_publish": True}),
            Flip("newer dispatch", r"j\.dispatch = gone\.dispatch", {"dispatch": 2}),
            Flip("older dispatch", r"j\.dispatch = gone\.dispatch", {"dispatch": 0}),
        ],
    ),
    Transition(
        "WAITING",
        republish.WAITING,
        "queued",
        lambda _: {
            "kind": KIND,
            "older_than": 30.0,
            "limit": 10,
            "length": 10,
            "besides": [],
            "delivered": 7,
        },
        [
            *statuses(predicates.queued_indexed, "queued"),
            Flip("kind", predicates.of_kind, {"kind": "other-kind"}),
            Flip("age", _OLDER, {"queued_at": ago(10)}),
            Flip("besides", r"id <> ALL\(.+?\]\)\)", parameters=lambda job: {"besides": [job["id"]]}),
            Flip("delivered", r"stream_seq <= CAST\(:delivered AS bigint\)", {"stream_seq": 8}),
        ],
        columns={"queued_at": ago(60), "stream_seq": 7},
        writes=False,
        names_rows=False,
    ),
    Transition(
        "POSTED",
        republish.POSTED,
        "queued",
        lambda _: {
            "older_than": 30.0,
            "limit": 10,
            "after": "-infinity",
            "after_id": UUID(int=0),
        },
        [
            *statuses(predicates.queued_indexed, "queued"),
            Flip("published", r"NOT needs_publish", {"needs_publish": True}),
            Flip("age", _OLDER, {"queued_at": ago(10)}),
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
            **_AGE,
        },
        [
            *statuses(predicates.processing, "processing"),
            Flip("newer token", _SEEN_TOKEN, {"fencing_token": 2}),
            Flip("older token", _SEEN_TOKEN, {"fencing_token": 0}),
            *_AGE_FLIPS,
        ],
        columns=_OLD_RUN,
    ),
    *(
        Transition(
            f"CANCEL {status}",
            control.CANCEL,
            status,
            lambda job: {"ids": [job["id"]], "statuses": list(STATES), **dict.fromkeys(_AGE)},
            [
                *statuses(predicates.live, "scheduled", "queued", "processing"),
                Flip(
                    "meant",
                    j.c.status == any_(given_array("statuses", Text)),
                    parameters=lambda job: {"statuses": [each for each in STATES if each != job["status"]]},
                ),
            ],
        )
        for status in ("scheduled", "queued", "processing")
    ),
    Transition(
        "CANCEL of runs by their age",
        control.CANCEL,
        "processing",
        lambda job: {"ids": [job["id"]], "statuses": ["processing"], **_AGE},
        _AGE_FLIPS,
        columns=_OLD_RUN,
    ),
    *(
        Transition(
            f"RETRY {status}",
            control.RETRY,
            status,
            lambda job: {"ids": [job["id"]]},
            [
                *statuses(predicates.may_be_retried, "failed", "cancelled"),
                Flip(
                    "cancelled for its needs",
                    predicates.may_be_retried,
                    {"status": "cancelled", "failure_reason": "needs"},
                ),
            ],
        )
        for status in ("failed", "cancelled")
    ),
    *(
        Transition(
            f"SET_PRIORITY {status}",
            priorities.SET_PRIORITY,
            status,
            lambda job: {"ids": [job["id"]], "priority": 0},
            [
                *statuses(predicates.waiting, "scheduled", "queued"),
                Flip("has it already", predicates.has_other_priority, {"priority": 0}),
            ],
        )
        for status in ("scheduled", "queued")
    ),
    Transition(
        "RESCHEDULE",
        RESCHEDULE,
        "scheduled",
        lambda job: {"ids": [job["id"]], "run_at": _LATER},
        [
            *statuses(predicates.waits_for_a_time, "scheduled"),
            Flip("held", predicates.waits_for_a_time, {"held_by": "limit", "run_at": None}),
        ],
    ),
]
