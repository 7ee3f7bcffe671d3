"""Rules about jobs: what the database and the processes recorded must fit together, whatever was done."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.faults import flow_control
from tests.faults.history import FINAL, History, Move
from tests.faults.workload import FAILS_FOR, SCHEDULES, WORKFLOW

Finding = tuple[str, str]
"""Which job or process, and what is wrong."""

Rule = Callable[[History], Iterator[Finding]]


def lost(history: History) -> Iterator[Finding]:
    """Every job that a producer was promised must be there and must have ended."""
    for job in history.deleted:
        yield job, "its row was deleted"
    for one in history.tries:
        if one.outcome == "ok" and one.kind == WORKFLOW:
            if one.job not in history.workflows:
                yield str(one.job), f"workflow {one.key} was promised and has no row"
        elif one.outcome == "ok" and one.job is not None:
            row = history.jobs.get(one.job)
            if row is None:
                yield one.job, f"{one.key} was promised and has no row"
            elif row.status not in FINAL:
                yield one.job, f"{one.key} was promised and is {row.status}"


def unexpected(history: History) -> Iterator[Finding]:
    """No job may come from nowhere; what a producer does not know of may exist, once for each key."""
    keys = {one.key for one in history.tries}
    promised = {one.job for one in history.tries if one.outcome == "ok"}
    by_key: dict[str, list[str]] = defaultdict(list)
    for workflow, name in history.workflows.items():
        if name not in keys:
            yield workflow, f"nobody enqueued workflow {name}"
        by_key[name].append(workflow)
    for row in history.jobs.values():
        if row.workflow is not None or row.schedule in SCHEDULES:
            continue
        if row.key not in keys and row.id not in promised:
            yield row.id, f"nobody enqueued it (key {row.key})"
        elif row.key is not None:
            by_key[row.key].append(row.id)
    unclear = {one.key for one in history.tries if one.outcome == "unknown"}
    for key, jobs in by_key.items():
        if len(jobs) > 1 and key not in unclear:
            yield jobs[-1], f"{key} exists {len(jobs)} times and was never unclear"


def completed_twice(history: History) -> Iterator[Finding]:
    """At most one accepted completion for each job."""
    counts = Counter(move.job for move in history.moves if move.now == "completed" != move.was)
    for job, count in counts.items():
        if count > 1:
            yield job, f"completed {count} times"


def transactional_effects(history: History) -> Iterator[Finding]:
    """Exactly one effect for each completed job, under the completing token; none for any other."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for effect in history.effects:
        tokens[effect.job].append(effect.token)
    for row in history.jobs.values():
        if row.kind == "transactional":
            wanted = [row.token] if row.status == "completed" else []
            if tokens[row.id] != wanted:
                yield row.id, f"{row.status} at token {row.token}, its effects are {tokens[row.id]}"


def fenced_effects(history: History) -> Iterator[Finding]:
    """Accepted effects of a job come in the order of its tokens; the last is the completing run's."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for effect in history.ledger:
        tokens[effect.job].append(effect.token)
    for job, accepted in tokens.items():
        if any(before >= after for before, after in pairwise(accepted)):
            yield job, f"fenced effects came as {accepted}"
    for row in history.jobs.values():
        if row.kind == "fenced" and row.status == "completed" and tokens[row.id][-1:] != [row.token]:
            yield row.id, f"completed at token {row.token}, its last fenced effect is {tokens[row.id][-1:]}"


def completing_token(history: History) -> Iterator[Finding]:
    """The result is that of the run which owned the job when it was completed."""
    for row in history.jobs.values():
        if row.status == "completed" and row.result_token not in (None, row.token):
            yield row.id, f"completed at token {row.token} with the result of token {row.result_token}"


def token_order(history: History) -> Iterator[Finding]:
    """Tokens and dispatches rise; a claim adds one to the token, and nothing else changes it."""
    for job, moves in history.moves_of.items():
        for move in moves:
            rise = move.token - move.old_token
            if rise != (1 if move.is_claim else 0):
                yield job, f"token {move.old_token} -> {move.token} while {move.was} -> {move.now}"
        for before, after in pairwise(moves):
            if after.old_token != before.token or after.was != before.now or after.dispatch < before.dispatch:
                yield job, f"moves do not follow each other: {_told(before)}, then {_told(after)}"


def stability(history: History) -> Iterator[Finding]:
    """A final row never changes; a failed one only by an operator's retry, and what was cancelled for it."""
    retried = {(event.job, event.token) for event in history.events if event.event == "retried"}
    held_again = {
        event.job
        for event in history.events
        if (event.event, event.detail.get("held_by")) == ("held", "needs")
    }
    for move in history.moves:
        if move.was == "cancelled" and move.now == "scheduled" and move.job in held_again:
            continue
        if move.was in ("completed", "cancelled") and move.was != move.now:
            yield move.job, f"{move.was} -> {move.now}"
        if move.was == "failed" != move.now and (move.job, move.token) not in retried:
            yield move.job, f"failed -> {move.now}, and nobody retried it"


def conservation(history: History) -> Iterator[Finding]:
    """Every attempt ended in an error, a stall or the outcome."""
    for row in history.jobs.values():
        ended = row.errors + row.stalls + (row.status in ("completed", "processing"))
        if row.attempts != ended:
            yield (
                row.id,
                f"{row.attempts} attempts, but {row.errors} errors, {row.stalls} stalls, {row.status}",
            )


def live_owner(history: History) -> Iterator[Finding]:
    """A claim takes a job from its owner only when the owner was silent for longer than the row allowed."""
    for move in history.moves:
        if move.is_claim and move.was == "processing":
            late = move.silent_for is not None and move.allowed is not None and move.silent_for > move.allowed
            if not late:
                yield move.job, f"taken from {move.owner}, silent for {move.silent_for} of {move.allowed} s"


def refused_by_database(history: History) -> Iterator[Finding]:
    """No statement of the protocol runs into a constraint or the guard."""
    for refusal in history.refusals:
        yield "", refusal


def right_end(history: History) -> Iterator[Finding]:
    """Innocent jobs complete; those made to fail fail, for the reason that was built in."""
    for row in history.jobs.values():
        wanted = FAILS_FOR.get(row.kind)
        if row.status == "failed" and row.reason != wanted:
            yield row.id, f"{row.kind} failed ({row.reason}), {row.errors} errors, {row.stalls} stalls"
        if row.status == "completed" and wanted is not None:
            yield row.id, f"{row.kind} completed"


def cancelled_as_asked(history: History) -> Iterator[Finding]:
    """A job that was asked to cancel while it ran does not run again."""
    asked: dict[str, int] = {}
    for event in history.events:
        if event.event == "cancel_requested" and event.token is not None:
            asked[event.job] = event.token
    for job, token in asked.items():
        for move in history.moves_of.get(job, []):
            if move.is_claim and move.old_token >= token:
                yield job, f"cancel was asked at token {token}, and it was claimed again"


def cancel_missed(history: History) -> Iterator[Finding]:
    """A cancel finds a job that has not ended, whatever the job does meanwhile."""
    ends: dict[str, float] = {}
    for move in sorted(history.moves, key=lambda move: move.seq):
        if move.now in FINAL:
            ends.setdefault(move.job, move.at)
    for cancel in history.cancels:
        if not cancel.heard and ends.get(cancel.job, cancel.end + 1.0) > cancel.end:
            yield cancel.job, "a cancel missed it while it was live"


def _flow_rule(name: str) -> "NamedRule":
    """Return the rule that finds what SQL saw broken."""

    def found(history: History) -> Iterator[Finding]:
        return ((subject, what) for rule, subject, what in sorted(history.broken) if rule == name)

    return NamedRule(name, found)


def _told(move: Move) -> str:
    return f"{move.was}/{move.old_token} -> {move.now}/{move.token} (dispatch {move.dispatch})"


@dataclass(frozen=True)
class NamedRule:
    """A rule and what its findings are called."""

    name: str
    check: Rule


SAFETY = (
    NamedRule("lost", lost),
    NamedRule("unexpected", unexpected),
    NamedRule("completed twice", completed_twice),
    NamedRule("transactional effects", transactional_effects),
    NamedRule("fenced effects", fenced_effects),
    NamedRule("result of another token", completing_token),
    NamedRule("token order", token_order),
    NamedRule("stability", stability),
    NamedRule("conservation", conservation),
    NamedRule("taken from a live owner", live_owner),
    NamedRule("refused by the database", refused_by_database),
    NamedRule("wrong end", right_end),
    NamedRule("cancelled and run again", cancelled_as_asked),
    NamedRule("cancel missed", cancel_missed),
    *map(
        _flow_rule,
        (flow_control.OVER_LIMIT, flow_control.INSTANTS, flow_control.BATCHES, flow_control.PLACES),
    ),
)
