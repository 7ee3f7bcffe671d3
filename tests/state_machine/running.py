"""How the machine is run: reproducible, and as long as somebody wants."""

import os

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from .example import Example
from .machine import OwnershipMachine
from .world import World

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "60"))
STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "40"))
SEED = int(os.environ.get("STATE_MACHINE_SEED", "200"))


def run_machine(
    world: World,
    *,
    examples: int,
    steps: int,
    with_seed: int,
    shrink: bool = True,
    machine: type[Example] = OwnershipMachine,
) -> None:
    """Run examples; the first violation is raised, by default in its smallest form.

    Args:
        world: where.
        examples: how many.
        steps: of each.
        with_seed: the same one gives the same examples.
        shrink: whether to look for a smaller example of a violation.
        machine: which rules.
    """

    class SeededMachine(machine):  # type: ignore[valid-type, misc]  # the rules are chosen at run time
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(
        seed(with_seed)(SeededMachine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
