"""Every guarded statement, a row that may take it, and for each predicate of its guard a row that may not.

A ``Flip`` changes a row that fulfils the whole guard so that one predicate fails and all others still hold;
the tests read it in both directions: the statement refuses the flipped row, and the same statement without
that predicate takes it.
"""

from collections.abc import Iterator

from .other_guards import NOT_OWNER
from .owner_guards import OWNER
from .transitions import Flip, Transition

TRANSITIONS = [*NOT_OWNER, *OWNER]


def flips() -> Iterator[tuple[Transition, Flip]]:
    """Return every predicate of every guard."""
    for transition in TRANSITIONS:
        for flip in transition.flips:
            yield transition, flip
