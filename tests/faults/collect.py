"""From the database, the processes' journals and the logs to a ``History``."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from jsworker.core.clock import boottime
from tests.faults.flow_control import ALWAYS, IN_THE_END
from tests.faults.history import (
    Effect,
    Event,
    History,
    JobRow,
    Life,
    Move,
    Run,
    Try,
)
from tests.faults.journal import read_journals

JOBS = """
SELECT id::text, unique_key AS key, kind, status, fencing_token AS token, attempts, errors, stalls, dispatch,
  failure_reason AS reason, (result->>'token')::bigint AS result_token,
  extract(epoch FROM created_at)::float8 AS created, schedule,
  (SELECT w.name FROM jsworker.batches AS b JOIN jsworker.workflows AS w ON w.id = b.workflow
   WHERE b.id = j.batch_id) AS workflow
FROM jsworker.jobs AS j
"""
MOVES = """
SELECT seq, job_id::text AS job, extract(epoch FROM at)::float8 AS at, was, now, old_token, token, dispatch,
  owner, worker, errors, stalls, silent_for, allowed
FROM faults.moves
"""
EVENTS = """
SELECT job_id::text AS job, extract(epoch FROM at)::float8 AS at, event, worker_id AS worker,
  fencing_token AS token, coalesce(detail, '{}') AS detail
FROM jsworker.job_events ORDER BY id
"""
EFFECTS = "SELECT job_id::text AS job, token FROM faults.effects ORDER BY id"
LEDGER = "SELECT job_id::text AS job, fence AS token FROM faults.ledger_log ORDER BY id"
DELETED = "SELECT job_id::text AS job FROM faults.deleted"
WORKFLOWS = "SELECT id::text, name FROM jsworker.workflows"
FINISHES = "SELECT count(*) AS batches FROM faults.finishes"
_STOPS = frozenset({"job.fenced", "job.lost", "job.cancelled"})


def collect(history: History, database_url: str, folder: Path) -> None:
    """Fill in what the database, the journals and the logs tell."""
    read_database(history, database_url)
    read_runs(history, folder)
    history.tries = read_tries(folder)
    read_logs(history, folder)


def read_database(history: History, url: str) -> None:
    """Fill in rows, moves, timeline, effects and what broke a rule of admission, schedules and workflows."""
    # Database and processes share a machine: one offset turns its clock into boot time.
    offset = boottime() - time.time()

    def rows(query: LiteralString) -> list[dict[str, Any]]:
        return connection.execute(query).fetchall()

    def timed(query: LiteralString, name: str = "at") -> list[dict[str, Any]]:
        return [row | {name: row[name] + offset} for row in rows(query)]

    # Times of the same clock are compared to the millisecond, and the two clocks do not run equally fast.
    history.cancels = [
        replace(each, start=each.start + offset, end=each.end + offset) for each in history.cancels
    ]
    with psycopg.connect(url, row_factory=dict_row) as connection:
        history.jobs = {row["id"]: JobRow(**row) for row in timed(JOBS, "created")}
        history.moves = [Move(**row) for row in timed(MOVES)]
        history.events = [Event(**row) for row in timed(EVENTS)]
        history.effects = [Effect(**row) for row in rows(EFFECTS)]
        history.ledger = [Effect(**row) for row in rows(LEDGER)]
        history.deleted = [row["job"] for row in rows(DELETED)]
        history.workflows = {row["id"]: row["name"] for row in rows(WORKFLOWS)}
        [history.batches] = [row["batches"] for row in rows(FINISHES)]
        for query in (ALWAYS, IN_THE_END):
            history.broken |= {(row["rule"], row["subject"], row["found"]) for row in rows(query)}


def read_runs(history: History, folder: Path) -> None:
    """Fill in what the worker processes recorded about their runs and about themselves."""
    begun: dict[tuple[int, str, int], dict[str, Any]] = {}
    lives: dict[int, _Signs] = {}
    runs: list[Run] = []
    for line in read_journals(folder, "run"):
        pid, at = int(line["pid"]), float(line["at"])
        match line["what"]:
            case "born":  # perhaps with the id of one that has died
                history.lives += _lives(lives.pop(pid, None))
                lives[pid] = _Signs(pid, line.get("pod", ""), line.get("parent"))
            case "tick":
                lives[pid].ticks.append(at)
            case "thread":
                lives[pid].threads.append(at)
            case "ended":
                lives[pid].ended = True
            case "start":
                key = pid, line["job"], line["token"]
                if key in begun:  # the same token once more in one process: an unfinished run of its own
                    runs.append(_run(begun.pop(key), None))
                begun[key] = line
            case "finish" | "broken":
                first = begun.pop((pid, line["job"], line["token"]), None)
                if first is not None:
                    runs.append(_run(first, line))
    history.runs = runs + [_run(line, None) for line in begun.values()]
    for signs in lives.values():
        history.lives += _lives(signs)


@dataclass
class _Signs:
    pid: int
    pod: str
    parent: int | None
    ticks: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    ended: bool = False


def _lives(signs: _Signs | None) -> list[Life]:
    if signs is None or not signs.ticks:
        return []
    return [Life(signs.pid, signs.pod, tuple(signs.ticks), tuple(signs.threads), signs.ended, signs.parent)]


def _run(start: dict[str, Any], end: dict[str, Any] | None) -> Run:
    return Run(
        job=start["job"],
        kind=start["kind"],
        token=start["token"],
        pid=start["pid"],
        start=start["at"],
        end=None if end is None else end["at"],
        how=None if end is None else end["what"],
    )


def read_tries(folder: Path) -> list[Try]:
    """Return the producers' tries; one without an outcome died with its producer, and is unknown."""
    begun: dict[tuple[int, str, int], dict[str, Any]] = {}
    tries: list[Try] = []
    for line in read_journals(folder, "producer"):
        match line["what"]:
            case "try":
                begun[line["pid"], line["key"], line["number"]] = line
            case "ok" | "fail" | "unknown":
                first = begun.pop((line["pid"], line["key"], line["number"]))
                tries.append(Try(line["key"], first["kind"], line["what"], line.get("job"), line["at"]))
    return tries + [Try(one["key"], one["kind"], "unknown", None, one["at"]) for one in begun.values()]


def read_logs(history: History, folder: Path) -> None:
    """Fill in how often the pods logged each event, and what they said of their heartbeats and runs."""
    offset = boottime() - time.time()
    counts: Counter[str] = Counter()
    for path in folder.glob("pod-*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                continue
            try:
                told = json.loads(line)
                counts[told["event"]] += 1
            except (ValueError, KeyError):  # a line that was torn by a kill
                counts["torn line"] += 1
                continue
            if told["event"] in _STOPS or told["event"] == "heartbeat.failed":
                at = datetime.fromisoformat(told["timestamp"]).timestamp() + offset
                if told["event"] in _STOPS:
                    history.stops[told["worker_id"]].append((at, told["job_id"]))
                else:
                    history.failed_heartbeats[told["worker_id"]].append(at)
    history.log_events = dict(counts)
