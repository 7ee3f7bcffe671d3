"""The ownership protocol on a real database, in random order, against a model of it.

``STATE_MACHINE_EXAMPLES=3000 STATE_MACHINE_STEPS=80 STATE_MACHINE_SEED=7`` before the command give a long
run, ``-rP`` after it shows how often everything was met.
"""

from itertools import chain, count

from .outcomes import OUTCOMES
from .running import EXAMPLES, SEED, STEPS, run_machine
from .world import World

ROUND = 4
"""Examples of one seed: more of them resemble each other."""
MOST_ROUNDS = 60
"""Until every outcome was met; more when more examples are asked for."""
RARE = (227, 238, 321)
"""Seeds that meet what others hardly do. After a change of rules others may, and this takes longer."""


def test_the_statements_do_what_the_protocol_says(world: World) -> None:
    rounds, seeds = 0, chain(RARE, count(SEED))
    try:
        while rounds * ROUND < EXAMPLES or (rounds < MOST_ROUNDS and OUTCOMES - set(+world.seen)):
            run_machine(world, examples=ROUND, steps=STEPS, with_seed=next(seeds))
            rounds += 1
    finally:
        _print_statistics(world, rounds)
    missed = sorted(OUTCOMES - set(+world.seen))
    assert not missed, f"never met in {rounds * ROUND} examples: {missed}"


def _print_statistics(world: World, rounds: int) -> None:
    print(f"{rounds} rounds of {ROUND} examples of {STEPS} steps, seeds {RARE} and from {SEED} on")  # noqa: T201 -- for -rP
    for outcome in sorted(OUTCOMES):
        print(f"{world.seen[outcome]:6} {outcome}")  # noqa: T201 -- for -rP
