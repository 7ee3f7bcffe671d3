"""``python -m benchmarks.compare BEFORE AFTER``: no-op jobs per second of two checkouts, in turns.

Both run with this interpreter and its packages, each with the sources of its own folder::

    git worktree add ../before main
    python -m benchmarks.compare ../before . --rounds 15
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

_RUN = """
import sys
from benchmarks.runs import drain
from benchmarks.servers import running_servers
with running_servers() as servers:
    drain(servers, "jsworker", 1000)
    sys.stdout.write(str(drain(servers, "jsworker", int(sys.argv[1]))))
"""
_LONGEST_SECONDS = 600.0


def compare(before: Path, after: Path, *, rounds: int, jobs: int) -> list[tuple[float, float]]:
    """Return jobs per second of both, one pair for each round; in every second round ``after`` runs first."""
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds):
        order = (before, after) if turn % 2 == 0 else (after, before)
        rates = [_rate(folder, jobs) for folder in order]
        pairs.append((rates[turn % 2], rates[1 - turn % 2]))
        sys.stdout.write("round {}: {:,.0f} and {:,.0f} jobs/s\n".format(turn + 1, *pairs[-1]))
        sys.stdout.flush()
    return pairs


def _rate(folder: Path, jobs: int) -> float:
    answer = subprocess.run(  # noqa: S603 -- this interpreter, and a folder that the caller names
        [sys.executable, "-c", _RUN, str(jobs)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        stdout=subprocess.PIPE,
        check=True,
        timeout=_LONGEST_SECONDS,
    )
    return float(answer.stdout)


def main() -> None:
    """Compare, and print the median and the quartiles of the pairs' ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="No-op jobs in turns.")
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of the other one")
    parser.add_argument("--rounds", type=int, default=9, help="pairs, at least 2 (default: 9)")
    parser.add_argument("--jobs", type=int, default=40_000, help="of each run (default: 40,000)")
    options = parser.parse_args()
    pairs = compare(options.before, options.after, rounds=options.rounds, jobs=options.jobs)
    low, middle, high = statistics.quantiles([after / before for before, after in pairs], n=4)
    sys.stdout.write(f"after ÷ before: median {middle:.3f}, quartiles {low:.3f} and {high:.3f}\n")


if __name__ == "__main__":
    main()
