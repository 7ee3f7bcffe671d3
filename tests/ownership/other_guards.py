"""The guards of everybody who does not own the row: publishers, claimers, sweepers, operators."""

import re
from uuid import UUID

from jsworker.ownership.queries import run_age
from jsworker.ownership.transitions import claim, control, publish, republish, reset_rules
from jsworker.ownership.transitions.enqueue import new_job_id

from .rows import KIND, OTHER_WORKER, STATES, WORKER, ago, seconds
from .transitions import Flip, Parameters, Row, Transition, statuses

_SEEN_TOKEN = r"j\.fencing_token = seen\.token"
_QUEUED = r"(j\.)?status = 'queued'"
_LIVE = r"(j\.)?status IN \('scheduled', 'queued', 'processing'\)"
_SEEN_ACTIVITY = r"j\.last_activity_at = seen\.activity"
_STALE = r"j\.last_activity_at \+ j\.stale_after < clock_timestamp\(\)"
_CRASHED = r"j\.last_activity_at \+ j\.crash_after < clock_timestamp\(\)"
_OLDER = r"j\.queued_at < statement_timestamp\(\)[^\n]+"
_TO_PUBLISH = r"CAST\(needs_publish AS integer\) = 1|j\.needs_publish(?= AND)"


def _as_seen(job: Row) -> Parameters:
    return {
        "ids": [job["id"]],
        "tokens": [job["fencing_token"]],
        "activities": [job["last_activity_at"]],
        "in_line": [False],
    }


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


_AGE = {"stale_for": 30.0, "running_for": 30.0, "no_progress_for": 30.0}
_OLD_RUN = {"last_activity_at": ago(60), "claimed_at": ago(60), "progress_at": ago(60)}
_AGE_FLIPS = [
    Flip(name, re.escape(predicate), parameters=lambda _, name=name: {name: 90.0})  # type: ignore[misc]
    for name, predicate in (
        ("stale_for", run_age.IS_SILENT),
        ("running_for", run_age.HAS_RUN),
        ("no_progress_for", run_age.STANDS_STILL),
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
            *statuses(_QUEUED, "queued"),
            Flip("needs_publish", _TO_PUBLISH, {"needs_publish": False}),
            Flip(
                "publish_after",
                r"(j\.)?publish_after <= statement_timestamp\(\)",
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
        publish.PROMOTE,
        "scheduled",
        lambda _: {"limit": 10, "within": 1e9},
        [
            *statuses(r"status \|\| '' = 'scheduled'|j\.status = 'scheduled'", "scheduled"),
            Flip("run_at", r"(j\.)?run_at <= statement_timestamp\(\)", {"run_at": ago(-60)}),
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
            ("stale", reset_rules.RESET_STALE, _STALE, "stale_after"),
            ("crashed", reset_rules.RESET_CRASHED, _CRASHED, "crash_after"),
        )
    ),
    Transition(
        "RESET dead",
        reset_rules.RESET_DEAD,
        "processing",
        lambda _: {
            "worker_id": OTHER_WORKER,
            "owner": WORKER,
            "reason": "killed",
            "counted": True,
            "culprits": [],
            "in_line": [],
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
        republish.REPUBLISH,
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
        republish.WAITING,
        "queued",
        lambda _: {
            "kinds": [KIND],
            "older_than": 30.0,
            "limit": 10,
            "length": 10,
            "besides": [],
            "delivered": 7,
        },
        [
            *statuses(r"j\.status \|\| '' = 'queued'", "queued"),
            Flip("kind", r"j\.kind = k\.kind", {"kind": "other-kind"}),
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
        reset_rules.RESET_BY_OPERATOR,
        "processing",
        lambda job: {
            "worker_id": None,
            "reason": "by hand",
            "ids": [job["id"]],
            "tokens": [job["fencing_token"]],
            **_AGE,
        },
        [
            *statuses(r"j\.status = 'processing'", "processing"),
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
                *statuses(_LIVE, "scheduled", "queued", "processing"),
                Flip(
                    "meant",
                    r"status = ANY\(CAST\(:statuses AS text\[\]\)\)",
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
    Transition(
        "RETRY",
        control.RETRY,
        "failed",
        lambda job: {"id": job["id"]},
        statuses(r"(j\.)?status = 'failed'", "failed"),
    ),
]
