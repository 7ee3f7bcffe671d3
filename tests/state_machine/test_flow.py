"""Admission, workflows and schedules on a real database, in random order, against a model of them."""

from .flow import FlowMachine
from .outcomes import FLOW_OUTCOMES
from .running import EXAMPLES, SEED, STEPS, run_machine
from .world import World

ROUND = 4
"""Examples of one seed: more of them resemble each other."""
MOST_ROUNDS = 60
"""Until every outcome was met; more when more examples are asked for."""


def test_the_statements_do_what_the_protocol_says(world: World) -> None:
    rounds = 0
    while rounds * ROUND < EXAMPLES or (rounds < MOST_ROUNDS and FLOW_OUTCOMES - set(+world.seen)):
        run_machine(world, examples=ROUND, steps=STEPS, with_seed=SEED + rounds, machine=FlowMachine)
        rounds += 1
    missed = sorted(FLOW_OUTCOMES - set(+world.seen))
    assert not missed, f"never met in {rounds * ROUND} examples: {missed}"
