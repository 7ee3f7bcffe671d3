"""Every rule of the checker finds what it is there for, and nothing in a history that is in order."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults import flow_control
from tests.faults.checker import HELD_UP, Verdict, check
from tests.faults.figures import figures
from tests.faults.history import Cancel, Effect, Event, Exit, Fault, History, JobRow, Life, Move, Run, Try

HEARTBEAT = 0.3
OWNER, RESCUER = "pod0-100-aaaaaaaa", "pod1-200-bbbbbbbb"
KILLED_AT = 10.0
LAST_TICK = 30.0

Change = Callable[[History], Any]


def ticks(start: float, end: float) -> tuple[float, ...]:
    return tuple(start + n / 10 for n in range(round((end - start) * 10) + 1))


def recovered() -> History:
    """A job whose owner is killed in its first run and which another worker completes; and a plain one."""
    return History(
        quiet_since=20.0,
        drained=21.0,
        tries=[
            Try("one", "transactional", "unknown", None, 1.0),
            Try("one", "transactional", "ok", "a", 1.1),
            Try("two", "fenced", "ok", "b", 1.1),
        ],
        jobs={
            "a": JobRow("a", "one", "transactional", "completed", 2, 2, 0, 1, 2, None, 2, 1.0),
            "b": JobRow("b", "two", "fenced", "completed", 1, 1, 0, 0, 1, None, 1, 1.0),
        },
        moves=[
            move(1, "a", 9.0, "queued processing", "0 1", worker=OWNER),
            move(2, "a", 12.2, "processing queued", "1 1", owner=OWNER, dispatch=2, silent_for=2.2, stalls=1),
            move(3, "a", 12.3, "queued processing", "1 2", worker=RESCUER, dispatch=2, stalls=1),
            move(4, "a", 13.0, "processing completed", "2 2", owner=RESCUER, dispatch=2, stalls=1),
            move(5, "b", 9.0, "queued processing", "0 1", worker=RESCUER),
            move(6, "b", 9.5, "processing completed", "1 1", owner=RESCUER),
        ],
        events=[
            Event("a", 12.2, "reset", RESCUER, 1, {"cause": "stale", "owner": OWNER}),
            Event("a", 12.3, "claimed", RESCUER, 2, {}),
        ],
        runs=[
            Run("a", "transactional", 1, 100, 9.1, None, None),
            Run("a", "transactional", 2, 200, 12.4, 12.9, "finish"),
            Run("b", "fenced", 1, 200, 9.1, 9.4, "finish"),
        ],
        effects=[Effect("a", 2)],
        ledger=[Effect("b", 1)],
        faults=[
            Fault(
                "sigkill_child",
                KILLED_AT,
                KILLED_AT,
                frozenset({"process"}),
                frozenset({"pod0"}),
                frozenset({100}),
            )
        ],
        lives=[Life(100, "pod0", ticks(1.0, KILLED_AT)), Life(200, "pod1", ticks(1.0, LAST_TICK))],
        must_fire=frozenset({"sigkill_child"}),
        must_see=frozenset({"reset: stale"}),
    )


def move(seq: int, job: str, at: float, change: str, tokens: str, **facts: Any) -> Move:
    (was, now), (old_token, token) = change.split(), map(int, tokens.split())
    values: dict[str, Any] = {
        "dispatch": 1,
        "owner": None,
        "worker": None,
        "errors": 0,
        "stalls": 0,
        "silent_for": None,
        "allowed": 2.0,
    }
    return Move(seq, job, at, was, now, old_token, token, **(values | facts))


def verdict_of(change: Change | None = None) -> Verdict:
    history = recovered()
    if change is not None:
        change(history)
    return check(history, heartbeat_interval=HEARTBEAT)


def row(job: str, **changes: Any) -> Change:
    return lambda history: history.jobs.update({job: replace(history.jobs[job], **changes)})


def moved(index: int, **changes: Any) -> Change:
    def change(history: History) -> None:
        history.moves[index] = replace(history.moves[index], **changes)

    return change


def both(*changes: Change) -> Change:
    return lambda history: [change(history) for change in changes]


def told(cause: str) -> Change:
    def change(history: History) -> None:
        history.events[0] = replace(history.events[0], detail={"cause": cause})

    return change


def without_fault(history: History) -> None:
    history.faults.clear()
    history.must_fire = frozenset()


def owner_lives_on(history: History) -> None:
    history.lives[0] = Life(100, "pod0", ticks(1.0, LAST_TICK))


def test_a_kill_that_was_recovered_is_in_order() -> None:
    verdict = verdict_of()
    assert verdict.findings == {rule: [] for rule in verdict.findings}
    assert verdict.ok
    assert [(rerun.token, rerun.cause, rerun.excuse) for rerun in verdict.reruns] == [
        (2, "reset: stale", "sigkill_child")
    ]
    assert verdict.overlaps == []


def broken(rule: str) -> tuple[str, Change]:
    return rule, lambda history: history.broken.add((rule, "b", "as SQL told"))


def idle(start: float, end: float) -> Change:
    return lambda history: history.idle.append(("schedule nightly", start, end))


BROKEN: dict[str, tuple[str, Change]] = {
    "a promised job has no row": ("lost", lambda history: history.jobs.pop("b")),
    "a promised job never ended": ("lost", row("b", status="queued")),
    "a row was deleted": ("lost", lambda history: history.deleted.append("b")),
    "a job that nobody enqueued": ("unexpected", row("b", key="of nobody", id="c")),
    "twice, although never unclear": (
        "unexpected",
        lambda history: history.jobs.update({"c": replace(history.jobs["b"], id="c")}),
    ),
    "two completions": (
        "completed twice",
        lambda history: history.moves.append(move(9, "b", 9.9, "processing completed", "1 1")),
    ),
    "a completion without its effect": ("transactional effects", lambda history: history.effects.clear()),
    "an effect of a run that did not complete": (
        "transactional effects",
        lambda history: history.effects.insert(0, Effect("a", 1)),
    ),
    "an older effect after a newer one": (
        "fenced effects",
        lambda history: history.ledger.append(Effect("b", 0)),
    ),
    "the last effect is not the completing run's": ("fenced effects", lambda history: history.ledger.clear()),
    "a zombie's result was stored": ("result of another token", row("a", result_token=1)),
    "a claim without a new token": ("token order", moved(2, token=1)),
    "a token changed outside a claim": ("token order", moved(1, token=2)),
    "a move from a state in which the job was not": ("token order", moved(3, was="queued")),
    "a final row changed": (
        "stability",
        lambda history: history.moves.append(move(9, "b", 11.0, "completed queued", "1 1")),
    ),
    "a failed job came back by itself": (
        "stability",
        lambda history: history.moves.append(move(9, "b", 11.0, "failed queued", "1 1")),
    ),
    "an attempt that nobody accounts for": ("conservation", row("a", attempts=3)),
    "a claim took a job from an owner who had just beaten": (
        "taken from a live owner",
        moved(2, was="processing", silent_for=0.2),
    ),
    "a constraint refused a statement": (
        "refused by the database",
        lambda history: history.refusals.append("jobs_conservation"),
    ),
    "an innocent job failed": ("wrong end", row("b", status="failed", reason="stalled")),
    "a job made to fail completed": ("wrong end", row("b", kind="doomed")),
    "a job ran again after it was to be cancelled": (
        "cancelled and run again",
        lambda history: history.events.append(Event("a", 9.5, "cancel_requested", None, 1, {})),
    ),
    "a cancel missed a live job": (
        "cancel missed",
        lambda history: history.cancels.append(Cancel("a", 10.0, 10.1, heard=False)),
    ),
    "the owner of a stale job was well": ("false resets", both(without_fault, owner_lives_on)),
    "the owner that was called dead gave a sign of life": (
        "false resets",
        both(told("dead"), owner_lives_on),
    ),
    "the fault hit another pod": (
        "false resets",
        both(
            owner_lives_on,
            lambda history: history.faults.append(replace(history.faults.pop(), pods=frozenset({"pod1"}))),
        ),
    ),
    "a second run that nothing explains": (
        "unexplained duplicate runs",
        both(without_fault, owner_lives_on),
    ),
    "two runs with one token": (
        "unexplained duplicate runs",
        lambda history: history.runs.append(replace(history.runs[1], start=12.5)),
    ),
    "a move that the timeline does not tell of": (
        "unexplained duplicate runs",
        both(without_fault, owner_lives_on, lambda history: history.events.clear()),
    ),
    "a run at a token that was never given": (
        "runs without a claim",
        lambda history: history.runs.append(replace(history.runs[2], token=7)),
    ),
    "a run in a pod that did not get the job": (
        "runs without a claim",
        lambda history: history.runs.append(replace(history.runs[2], pid=100, start=9.2)),
    ),
    "an innocent job ended in an error": (
        "errors of innocent jobs",
        both(
            without_fault,
            owner_lives_on,
            lambda history: history.events.append(replace(history.events.pop(0), event="error", detail={})),
        ),
    ),
    "SQL saw more runs of a key than its limit": broken(flow_control.OVER_LIMIT),
    "SQL saw an instant with two jobs": broken(flow_control.INSTANTS),
    "SQL saw a batch that finished twice": broken(flow_control.BATCHES),
    "SQL saw a held job that lost its place": broken(flow_control.PLACES),
    "nobody fired a schedule, although the database could be reached": (HELD_UP, idle(10.0, 26.0)),
    "a job is left over": ("never ended", row("b", status="scheduled")),
    "a parent ended by itself": (
        "ended by itself",
        lambda history: history.exits.append(Exit("pod1", 19.0, 1, "why")),
    ),
    "a process died, killed by nobody": ("died by itself", without_fault),
    "a nemesis that was asked for never struck": ("never seen", lambda history: history.faults.clear()),
    "a path that must be taken was not": (
        "never seen",
        lambda history: setattr(history, "must_see", frozenset({"rejected: complete"})),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_finds_what_it_is_there_for(name: str) -> None:
    rule, change = BROKEN[name]
    assert rule in verdict_of(change).broken


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _ in BROKEN.values()} == set(verdict_of().findings)


def test_nobody_is_to_see_to_what_is_held_while_the_database_is_away() -> None:
    outage = Fault("postgres_outage", 9.0, 12.0, frozenset({"database"}))
    away = both(idle(10.0, 26.0), lambda history: history.faults.append(outage))
    assert verdict_of(away).ok


def test_members_and_jobs_of_schedules_need_no_order_of_their_own() -> None:
    def many(history: History) -> None:
        history.tries += [
            Try("flow", "workflow", "unknown", None, 1.0),
            Try("flow", "workflow", "ok", "w", 1.1),
        ]
        history.workflows |= {"w": "flow", "v": "flow"}
        plain = replace(history.jobs["b"], key=None, kind="ordinary")
        history.jobs["c"] = replace(plain, id="c", workflow="flow")
        history.jobs["d"] = replace(plain, id="d", schedule="every-second")

    assert verdict_of(many).ok
    assert verdict_of(both(many, lambda history: history.workflows.pop("w"))).broken == ["lost"]
    assert verdict_of(both(many, lambda history: history.workflows.update(x="other"))).broken == [
        "unexpected"
    ]


def test_a_member_that_was_cancelled_for_a_failed_one_is_held_again_when_that_is_retried() -> None:
    def retried(history: History) -> None:
        again = [
            move(9, "c", 11.0, "scheduled cancelled", "0 0"),
            move(10, "c", 12.0, "cancelled scheduled", "0 0"),
        ]
        history.moves += again

    held = both(
        retried,
        lambda history: history.events.append(Event("c", 12.0, "held", None, 0, {"held_by": "needs"})),
    )
    assert "stability" in verdict_of(retried).broken
    assert verdict_of(held).ok


def test_a_job_enqueued_twice_is_fine_when_the_first_answer_was_lost() -> None:
    twice = both(
        lambda history: history.jobs.update({"c": replace(history.jobs["b"], id="c", key="one")}),
        lambda history: history.ledger.append(Effect("c", 1)),
    )
    assert verdict_of(twice).ok


def test_a_pause_that_nobody_injected_is_an_excuse_of_its_own() -> None:
    def paused(history: History) -> None:
        without_fault(history)
        history.lives[0] = Life(100, "pod0", ticks(1.0, 10.0) + ticks(12.5, LAST_TICK))

    verdict = verdict_of(paused)
    assert verdict.ok
    assert [rerun.excuse for rerun in verdict.reruns] == ["paused"]


@pytest.mark.parametrize(("parent", "broken"), [(100, []), (200, ["died by itself"])])
def test_the_process_of_a_job_that_runs_alone_dies_with_its_killed_worker(
    parent: int, broken: list[str]
) -> None:
    alone = Life(300, "pod0", ticks(1.0, KILLED_AT), parent=parent)
    assert verdict_of(lambda history: history.lives.append(alone)).broken == broken


def test_it_dies_with_a_worker_that_its_supervisor_has_ended() -> None:
    """A job blocked the worker's event loop: the worker died of that, and the other job's process with it."""

    def blocked(history: History) -> None:
        history.faults[0] = replace(history.faults[0], touches=frozenset({"loop"}))
        history.runs[0] = replace(history.runs[0], kind="loop-blocking")
        history.lives.append(Life(300, "pod0", ticks(1.0, KILLED_AT), parent=100))

    assert "died by itself" not in verdict_of(blocked).broken


@pytest.mark.parametrize(
    ("stopped", "begun", "crowded", "fine"),
    [
        ((RESCUER, 10.2), None, False, True),
        ((RESCUER, 12.0), None, False, False),  # another run, later
        ((OWNER, 10.2), None, False, False),  # another worker
        (None, None, True, False),
        ((RESCUER, 9.0), "finish", True, False),
        ((RESCUER, 9.0), "unfinished", True, True),
        ((RESCUER, 9.0), "unfinished", False, False),  # it had time to stop
        ((RESCUER, 9.0), "of another job", True, False),
        (None, "unfinished", True, False),
    ],
)
def test_a_worker_that_stops_a_run_ends_its_process(
    stopped: tuple[str, float] | None, begun: str | None, *, crowded: bool, fine: bool
) -> None:
    def ended(history: History) -> None:
        history.lives.append(Life(300, "pod1", ticks(8.0, 10.0), parent=history.lives[1].pid))
        if crowded:
            history.crowded.append((9.0, 13.0))
        if stopped is not None:
            history.stops[stopped[0]].append((stopped[1], "b"))
        if begun is not None:
            job, how = ("a" if begun == "of another job" else "b"), ("finish" if begun == "finish" else None)
            history.runs.append(replace(history.runs[-1], job=job, pid=300, start=8.5, end=None, how=how))

    assert ("died by itself" not in verdict_of(ended).broken) is fine


@pytest.mark.parametrize(("crowded", "broken"), [(True, []), (False, ["died by itself"])])
def test_what_waits_for_a_processor_may_be_silent_before_it_is_killed(
    broken: list[str], *, crowded: bool
) -> None:
    def silent(history: History) -> None:
        history.crowded += [(6.0, 9.0)] if crowded else []
        history.lives[0] = Life(100, "pod0", ticks(1.0, KILLED_AT - 2.5))
        history.runs[0] = replace(history.runs[0], start=7.0)
        history.faults[0] = replace(history.faults[0], touches=frozenset({"process", "database"}))

    assert [rule for rule in verdict_of(silent).broken if rule == "died by itself"] == broken


def test_a_process_id_may_be_given_anew() -> None:
    """Long after its owner's death: the owner has not lived on."""
    later = Life(100, "pod1", ticks(20.0, LAST_TICK))
    verdict = verdict_of(both(told("dead"), lambda history: history.lives.append(later)))
    assert verdict.findings["false resets"] == verdict.findings["unexplained duplicate runs"] == []
    assert [rerun.excuse for rerun in verdict.reruns] == ["dead"]


def test_a_busy_machine_is_an_excuse_of_its_own() -> None:
    def busy(history: History) -> None:
        without_fault(history)
        owner_lives_on(history)
        history.slow.append((11.0, 11.5))

    verdict = verdict_of(busy)
    assert verdict.ok
    assert [rerun.excuse for rerun in verdict.reruns] == ["slow machine"]


@pytest.mark.parametrize(
    ("crowded", "failed", "fine"),
    [
        ((10.5, 12.0), (OWNER, 11.5), True),
        ((10.5, 12.0), (OWNER, 12.5), True),  # told when its statement had timed out
        ((10.5, 12.0), (RESCUER, 11.5), False),
        ((10.5, 12.0), (OWNER, 7.0), False),
        ((7.0, 8.0), (OWNER, 11.5), False),
    ],
)
def test_on_a_crowded_machine_a_job_is_taken_only_from_who_said_that_its_heartbeats_failed(
    crowded: tuple[float, float], failed: tuple[str, float], *, fine: bool
) -> None:
    def crowd(history: History) -> None:
        without_fault(history)
        owner_lives_on(history)
        history.crowded.append(crowded)
        history.failed_heartbeats[failed[0]].append(failed[1])

    verdict = verdict_of(crowd)
    assert verdict.ok is fine
    assert [rerun.excuse for rerun in verdict.reruns] == ["crowded machine" if fine else None]


@pytest.mark.parametrize(
    ("crowded", "begun", "fine"),
    [((10.5, 12.0), False, True), ((10.5, 12.0), True, False), ((7.0, 8.0), False, False)],
)
def test_on_a_crowded_machine_a_claim_whose_owner_never_learned_of_it_may_be_taken(
    crowded: tuple[float, float], *, begun: bool, fine: bool
) -> None:
    def unknown(history: History) -> None:
        without_fault(history)
        owner_lives_on(history)
        history.crowded.append(crowded)
        if not begun:
            first = min(history.runs, key=lambda run: run.token)
            history.runs.remove(first)
            history.effects[:] = [each for each in history.effects if each.token != first.token]

    assert ("false resets" in verdict_of(unknown).broken) is not fine


def test_an_announced_quiet_phase_is_no_excuse_for_taking_the_job_that_announced_it() -> None:
    quiet = Fault("quiet_phase", 9.0, 12.5, frozenset({"loop"}), frozenset({"pod0"}))

    def announced(history: History) -> None:
        owner_lives_on(history)
        history.faults[:] = [quiet]
        history.must_fire = frozenset()

    assert verdict_of(announced).ok
    taken = both(announced, row("a", kind="quiet"))
    assert "false resets" in verdict_of(taken).broken

    def busy(history: History) -> None:
        taken(history)
        history.crowded.append((10.5, 12.0))

    assert "false resets" in verdict_of(busy).broken
    # But the machine itself may have kept heartbeats from being answered, as for any other job.
    told = both(busy, lambda history: history.failed_heartbeats[OWNER].append(11.5))
    assert verdict_of(told).ok


def test_figures_tell_how_fast_a_killed_worker_s_job_ran_again() -> None:
    history = recovered()
    found = figures(history, check(history, heartbeat_interval=HEARTBEAT))
    assert found["recovery"] == {"sigkill_child": {"count": 1, "p50": 2.4, "p99": 2.4, "max": 2.4}}
    assert found["taken_back"] == {"sigkill_child": {"count": 1, "p50": 2.2, "p99": 2.2, "max": 2.2}}
    assert (found["process_kills"], found["lost"], found["duplicate_runs_explained"]) == (1, 0, 1)
    assert found["duplicate_runs_by_cause"] == {"reset: stale": 1}


def test_an_overlap_is_counted() -> None:
    def overlapping(history: History) -> None:
        history.runs[0] = replace(history.runs[0], end=12.6, how="finish")

    assert [rerun.token for rerun in verdict_of(overlapping).overlaps] == [2]
