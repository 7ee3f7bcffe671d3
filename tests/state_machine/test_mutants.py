"""The machine finds what it is there to find: one statement is broken, and an example must show it."""

import pytest

from .example import Example
from .flow import FlowMachine
from .machine import OwnershipMachine
from .mutants import FLOW_MUTANTS, MUTANTS, Mutant
from .running import run_machine
from .world import World

MOST_SEEDS = 60
SEEDS = {
    "complete without its token": 5,
    "fail without its token": 46,
    "release without its token": 8,
    "fail ignores a cancel": 7,
    "release ignores a cancel": 44,
    "release keeps its dispatch": 6,
    "snooze without its token": 12,
    "snooze ignores a cancel": 5,
    "snooze without an end": 8,
    "the last result of a step stays": 21,
    "heartbeat without its token": 8,
    "progress without its token": 17,
    "stale claim of what is not stale": 4,
    "mark without its dispatch": 5,
    "publish keeps its turn": 4,
    "stale reset of what is not stale": 8,
    "reset ignores a cancel": 3,
    "retry keeps its counters": 6,
    "republish keeps its dispatch": 4,
    "what runs takes no slot": 4,
    "a run that has lost its job adds members": 27,
    "what was cancelled for a retried member stays so": 9,
    "an instant is fired again": 10,
    "a schedule is fired as it was": 14,
}
"""Where to look first, so that it takes no time; others are found from 1 on. After a change of rules these
may be found elsewhere: the search goes on from there, for up to a minute.
"""


CASES = [(mutant, OwnershipMachine) for mutant in MUTANTS] + [
    (mutant, FlowMachine) for mutant in FLOW_MUTANTS
]


@pytest.mark.thorough
@pytest.mark.parametrize(("mutant", "machine"), CASES, ids=[mutant.name for mutant, _ in CASES])
def test_a_mutant_is_found(world: World, mutant: Mutant, machine: type[Example]) -> None:
    with mutant.installed(), pytest.raises(AssertionError):
        _search(world, SEEDS.get(mutant.name, 1), machine)


def _search(world: World, first: int, machine: type[Example]) -> None:
    # A few examples of many seeds: those of one seed resemble each other.
    for seed in range(first, first + MOST_SEEDS):
        run_machine(world, examples=3, steps=40, with_seed=seed, shrink=False, machine=machine)
