"""Rules of runs that end: COMPLETE, FAIL, RELEASE, SNOOZE, in time, late, and again after a lost answer."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from jsworker.ownership.transitions import settle, snooze
from jsworker.ownership.transitions.settle import Completion, Failure, Return, Settled, Snoozing

from .example import Example, one_of, when
from .lives import Life, Run

EndedT = TypeVar("EndedT", Completion, Failure, Return, Snoozing)


_SNOOZES = {"snooze": 1, "snooze too often": 0, "sleep": None}
"""How many are allowed; None: it is not counted."""


def _in_hand(machine: Example) -> list[Run]:
    return [run for life in machine.alive for run in life.in_hand]


def _ended(machine: Example) -> list[Run]:
    """Return runs that ended or were lost, as far as anybody knows, and those of killed processes."""
    ended = [run for run in machine.runs if not run.in_hand or not run.life.alive]
    superseded = [run for run in machine.superseded if not run.in_hand]
    return superseded or [run for run in ended if run.job.live] + ended[-1:]


def _ended_of_live_jobs(machine: Example) -> list[Run]:
    return [run for run in _ended(machine) if run.job.live]


_of_one_life = one_of(_in_hand).flatmap(
    lambda run: st.lists(st.sampled_from(run.life.in_hand), min_size=1, max_size=3, unique=True)
)


class Settling(Example):
    """The last words of owners, and of those who believe to be owners."""

    @when(_in_hand)
    @rule(
        runs=_of_one_life,
        how=st.sampled_from(["complete", "fail", "fail", "fail for good", "stall", "release", *_SNOOZES]),
        answered=st.sampled_from([True, True, False]),
    )
    def end(self, runs: list[Run], how: str, *, answered: bool) -> None:
        """Runs of one worker end, settled in one batch."""
        self._settle(runs, how, answered=answered)

    @when(_ended_of_live_jobs)
    @rule(run=one_of(_ended), how=st.sampled_from(["complete", "fail", "release", "snooze"]))
    def end_late(self, run: Run, how: str) -> None:
        """A run wants to settle its job that ended long ago or whose process is dead."""
        self._settle([run], how, answered=True)

    def _settle(self, runs: list[Run], how: str, *, answered: bool) -> None:
        if how == "complete":
            completions = [Completion(run.job.id, run.token, str(run.token)) for run in runs]
            self._end(how, runs, completions, settle.complete, self.model.complete, answered=answered)
        elif how == "release":
            returns = [Return(run.job.id, run.token, "shutdown") for run in runs]
            self._end(how, runs, returns, settle.release, self.model.release, answered=answered)
        elif how in _SNOOZES:
            most = _SNOOZES[how]
            snoozes = [Snoozing(run.job.id, run.token, "later", 3600.0, most, "too often") for run in runs]
            self._end("snooze", runs, snoozes, snooze.snooze, self.model.snooze, answered=answered)
        else:
            permanent = "permanent" if how == "fail for good" else None
            failures = [
                Failure(run.job.id, run.token, f"broken at {run.token}", permanent, 3600.0, how == "stall")
                for run in runs
            ]
            self._end("fail", runs, failures, settle.fail, self.model.fail, answered=answered)

    def _end(
        self,
        write: str,
        runs: list[Run],
        ended: list[EndedT],
        call: Callable[..., Coroutine[Any, Any, list[Settled]]],
        predict: Callable[[str, Sequence[EndedT]], list[Settled]],
        *,
        answered: bool,
    ) -> None:
        life: Life = runs[0].life
        owned = [self.model.mine(life.id, run.held) is not None for run in runs]
        self.owner_may_end(life, {run.job.id: run.token for run in runs})
        predicted = predict(life.id, ended)
        answers = self.world.run(call(self.world.database, worker_id=life.id, runs=ended))
        if not answered:
            self.world.saw(f"{write}: answer lost")
            return
        assert answers == predicted
        for run, answer, mine in zip(runs, answers, owned, strict=True):
            self.settled(run, answer)
            settled_before = answer is not Settled.LOST and not mine
            self.world.saw(f"{write}: again" if settled_before else f"{write}: {answer.value}")
