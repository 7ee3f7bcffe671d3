"""Rules about recovery: nobody who lives is robbed, nothing runs twice without a reason, everything ends."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.faults.excuses import AFTERMATH_SECONDS, Excuses
from tests.faults.history import FINAL, SLOTS_EXHAUSTED, Event, History, Life, Move, Run, pod_of
from tests.faults.safety import Finding
from tests.faults.workload import FAILS_FOR, NEVER_ERRS

_ERRING_KINDS = frozenset({"flaky", "deaf", *FAILS_FOR})
_DEADLY_KINDS = frozenset({"poisonous", "loop-blocking", "gil-holding", "deaf"})
LONGEST_IDLE_SECONDS = 15.0
"""Two scans are under a second; but whoever would see to it may be killed, again and again."""
_SAME_END_SECONDS = 0.25
_DEATH_SECONDS = 1.0
"""From the last sign of a process to its death."""
_CROWDED_DEATH_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Rerun:
    """A run that was not the job's first one.

    Attributes:
        cause: how the claim before it ended: ``error``, ``released``, ``reset: stale`` ...
        excuse: the fault that explains it, None when nothing does.
    """

    job: str
    token: int
    cause: str
    excuse: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """One ownership, from the claim to its end."""

    job: str
    token: int
    worker: str
    start: float
    end: float | None
    last: Move | None
    told: Event | None


def claims(history: History) -> dict[tuple[str, int], Claim]:
    """Return every claim, by job and token, with what ended it and what the timeline says about that."""
    found: dict[tuple[str, int], Claim] = {}
    told: dict[tuple[str, int | None], list[Event]] = defaultdict(list)
    for line in history.events:
        told[line.job, line.token].append(line)
    for job, moves in history.moves_of.items():
        for index, move in enumerate(moves):
            if move.is_claim and move.worker is not None:
                after = moves[index + 1] if index + 1 < len(moves) else None
                end = None if after is None else after.at
                event = None if after is None else _ending(told, after)
                found[job, move.token] = Claim(job, move.token, move.worker, move.at, end, after, event)
    return found


def _ending(told: dict[tuple[str, int | None], list[Event]], move: Move) -> Event | None:
    """Return the line of the timeline that was written with a move."""
    candidates = told[move.job, move.token] + (told[move.job, move.old_token] if move.is_claim else [])
    near = [
        event
        for event in candidates
        if event.event in _ENDINGS and abs(event.at - move.at) < _SAME_END_SECONDS
    ]
    return min(near, key=lambda event: abs(event.at - move.at), default=None)


_ENDINGS = frozenset({"error", "failed", "cancelled", "released", "reset", "claimed"})


class Recovery:
    """Judges every claim that ended without an outcome, and every run after the first."""

    def __init__(self, history: History, *, heartbeat_interval: float) -> None:
        self._history = history
        self.excuses = Excuses(history, heartbeat_interval=heartbeat_interval)
        self.claims = claims(history)

    def false_resets(self) -> Iterator[Finding]:
        """Find resets whose owner was alive, not paused and reachable."""
        for claim in self.claims.values():
            cause = cause_of(claim)
            if cause is not None and cause.startswith("reset") and self._excuse(claim, cause) is None:
                yield claim.job, f"{cause} of token {claim.token}, whose owner {claim.worker} was well"

    def reruns(self) -> list[Rerun]:
        """Return every run after a job's first, with its explanation."""
        found = []
        for runs in self._history.runs_of.values():
            for before, run in pairwise(sorted(runs, key=lambda run: (run.token, run.start))):
                found.append(self._rerun(before, run))
        return found

    def unexplained(self) -> Iterator[Finding]:
        """Find runs that nothing explains: no fault, no error, no release."""
        for rerun in self.reruns():
            if rerun.excuse is None:
                yield rerun.job, f"run again at token {rerun.token} after {rerun.cause}"

    def unclaimed(self) -> Iterator[Finding]:
        """Find runs by a process that never got the job."""
        for run in self._history.runs:
            claim = self.claims.get((run.job, run.token))
            life = self._history.life_of(run.pid, run.start)
            if claim is None:
                yield run.job, f"run by process {run.pid} at token {run.token}, which nobody was given"
            elif life is not None and life.pod != pod_of(claim.worker):
                yield run.job, f"run by {life.pod} at token {run.token}, which {claim.worker} was given"

    def overlaps(self) -> list[Rerun]:
        """Return runs that began while an earlier one of the same job still went on elsewhere."""
        found = []
        for runs in self._history.runs_of.values():
            for before, run in pairwise(sorted(runs, key=lambda run: (run.token, run.start))):
                if run.start < self._end_of(before):
                    found.append(self._rerun(before, run))
        return found

    def innocent_errors(self) -> Iterator[Finding]:
        """Find errors of jobs that have none of their own, when no fault gave them one."""
        for claim in self.claims.values():
            row = self._history.jobs.get(claim.job)
            if cause_of(claim) == "error" and row is not None and row.kind not in _ERRING_KINDS:
                end = claim.start if claim.end is None else claim.end
                excuse = self.excuses.for_error(claim.worker, claim.job, claim.start, end)
                if excuse is None or row.kind in NEVER_ERRS:
                    yield claim.job, f"{row.kind} ended in an error at token {claim.token}"

    def _rerun(self, before: Run, run: Run) -> Rerun:
        if before.token == run.token:
            return Rerun(run.job, run.token, "a run with the same token", None)
        claim = self.claims.get((before.job, before.token))
        cause = None if claim is None else cause_of(claim)
        if claim is None or cause is None:
            return Rerun(run.job, run.token, "a claim that never ended", None)
        return Rerun(run.job, run.token, cause, self._excuse(claim, cause))

    def _excuse(self, claim: Claim, cause: str) -> str | None:
        excuse = self._plain_excuse(claim, cause)
        row = self._history.jobs.get(claim.job)
        # What was announced is no excuse for taking the very job that announced it.
        if row is not None and row.kind == "quiet" and excuse in ("quiet_phase", "paused"):
            return self.excuses.for_failed_heartbeats(claim.worker, *_silence(claim))
        return excuse

    def _plain_excuse(self, claim: Claim, cause: str) -> str | None:
        start, end = _silence(claim)
        match cause:
            case "error" | "reset: operator":
                return cause
            case "released":
                return self.excuses.for_letting_go(claim.worker, claim.job, claim.start, end)
            case "reset: dead":
                return "dead" if self.excuses.is_dead(claim.worker, end) else None
            case _:
                silence = self.excuses.for_silence(claim.worker, claim.job, start, end)
                is_stale = cause in ("reset: stale", "reset: stale owner")
                unknown = is_stale and not self._has_begun(claim)
                return silence or (self.excuses.for_unknown_claim(claim.start, end) if unknown else None)

    def _has_begun(self, claim: Claim) -> bool:
        return any(run.token == claim.token for run in self._history.runs_of.get(claim.job, ()))

    def _end_of(self, run: Run) -> float:
        if run.end is not None:
            return run.end
        life = self._history.life_of(run.pid, run.start)
        return life.ticks[-1] if life and life.ticks else run.start


def _silence(claim: Claim) -> tuple[float, float]:
    """Return the time before a claim's end in which its owner may have been silent."""
    end = claim.start if claim.end is None else claim.end
    allowed = (claim.last.allowed if claim.last else None) or 0.0
    return max(claim.start, end - allowed - 1.0), end


def cause_of(claim: Claim) -> str | None:
    """Return how a claim ended when it ended without an outcome; None when it had one, or never ended."""
    move = claim.last
    if move is None or move.now == "completed":
        return None
    if move.is_claim:
        return "reset: stale owner"
    if claim.told is None:
        return f"untold {move.was} -> {move.now}"
    if claim.told.event == "reset":
        return f"reset: {claim.told.detail.get('cause')}"
    if claim.told.event == "cancelled":
        return None
    return "error" if claim.told.event == "failed" else claim.told.event


def liveness(history: History) -> Iterator[Finding]:
    """Once faults have stopped, every job ends within the deadline."""
    for row in history.jobs.values():
        if row.status not in FINAL:
            yield row.id, f"{row.kind} is {row.status} (token {row.token}, dispatch {row.dispatch})"


def held_up(history: History) -> Iterator[Finding]:
    """L6: what may go on is not left alone, unless the database is away or the machine too busy."""
    outages = [
        (fault.start, fault.end + AFTERMATH_SECONDS)
        for fault in history.faults
        if fault.touches & {"database", "rows"}
    ]
    outages = sorted(outages + history.slow + history.crowded)
    for what, since, until in history.idle:
        begun = since
        for start, end in outages:
            if start <= until and end >= begun:
                begun = max(begun, end)
        if until - begun > LONGEST_IDLE_SECONDS:
            yield what, f"might have gone on for {until - begun:.1f} s, and nobody saw to it"


def exits(history: History) -> Iterator[Finding]:
    """No parent ends by itself while its servers can be reached."""
    for end in history.exits:
        touched = (
            fault.hits(end.pod, end.at - 15.0, end.at, {"database", "nats"})
            for fault in history.faults
            if fault.name != SLOTS_EXHAUSTED
        )
        if not any(touched):
            words = (end.words.strip().splitlines() or [""])[-1]
            yield end.pod, f"ended by itself with exit code {end.code}: {words[:300]}"


def deaths(history: History, excuses: Excuses) -> Iterator[Finding]:
    """No worker process dies that nobody killed."""
    over = max((life.ticks[-1] for life in history.lives if life.ticks), default=0.0)
    for life in history.lives:
        last = life.last_sign
        if last is None or life.ended or last > over - _DEATH_SECONDS:
            continue
        # What waits for a processor gives no sign of life before it dies.
        silent = _CROWDED_DEATH_SECONDS if excuses.is_crowded(last) else _DEATH_SECONDS
        killed = any(
            "process" in fault.touches
            and (fault.pids & {life.pid, life.parent} or (not fault.pids and life.pod in fault.pods))
            and fault.start - silent <= last <= fault.end + _DEATH_SECONDS
            for fault in history.faults
        )
        deadly = any(
            run.pid == life.pid and run.kind in _DEADLY_KINDS and run.start <= last + 0.2 and run.how is None
            for run in history.runs
        )
        exited = any(end.pod == life.pod and abs(end.at - last) < 2 * silent for end in history.exits)
        # A job that runs alone dies with its worker, whose own death is judged by itself.
        worker = None if life.parent is None else history.life_of(life.parent, last)
        orphaned = worker is not None and abs((worker.last_sign or 0.0) - last) < silent and not worker.ended
        if not (killed or deadly or exited or orphaned or excuses.was_ended_by_worker(life, last)):
            yield str(life.pid), f"process of {life.pod} died, killed by nobody: {_of_death(history, life)}"


def _of_death(history: History, life: Life) -> str:
    last = life.last_sign or 0.0
    loop, thread = ((signs or (last,))[-1] - history.started for signs in (life.ticks, life.threads))
    runs = [run for run in history.runs if run.pid == life.pid and run.start <= last + 0.2]
    facts = [
        f"last sign of its loop at {loop:.1f} s, of a thread at {thread:.1f} s",
        f"lived {last - (life.first_sign or last):.1f} s below process {life.parent}",
        f"{len(runs)} runs, without an end: {[run.kind for run in runs if run.how is None]}",
    ]
    near = [fault for fault in history.faults if fault.start - 5.0 <= last <= fault.end + 5.0]
    facts += [f"{fault.name} of {sorted(fault.pods)} {fault.start - last:+.1f} s" for fault in near]
    return "; ".join(facts)


def seen_paths(history: History) -> set[str]:
    """Return what happened at least once: ways in which late writes were refused, and how jobs came back."""
    seen = {f"{event.event}" for event in history.events}
    for event in history.events:
        if event.event == "rejected":
            seen.add(f"rejected: {event.detail.get('write')}")
        if event.event == "reset":
            seen.add(f"reset: {event.detail.get('cause')}")
    if any(move.is_claim and move.was == "processing" for move in history.moves):
        seen.add("reset: stale owner")
    return seen | {f"log: {name}" for name in history.log_events}


def sometimes(history: History) -> Iterator[Finding]:
    """Every nemesis that was asked for has struck, and every path was taken that must be taken somewhere."""
    fired = {fault.name for fault in history.faults if fault.fired}
    for name in sorted(history.must_fire - fired):
        yield name, "never struck"
    for path in sorted(history.must_see - seen_paths(history)):
        yield path, "never happened"
