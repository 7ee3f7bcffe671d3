"""The start times of jobs, in memory that a run's processes share: a mark costs a tenth of a microsecond.

A worker writes the machine's monotonic clock into the place of the job's number. So nothing has to be handed
over at the end, and watching the jobs puts no load on a server.
"""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

VARIABLE = "BENCHMARK_STAMPS"
_BYTES = 8

now = time.monotonic
"""The clock of the marks."""

Places: TypeAlias = "memoryview[float]"
"""Seconds of the monotonic clock by the job's number; 0.0: not started."""


def places() -> Places:
    """Return the shared memory of this run, whose file an environment variable names."""
    path = os.environ[VARIABLE]
    return _mapped(Path(path))


class Stamps:
    """The start times of one run's jobs, for the process that watches them."""

    def __init__(self, path: Path, count: int) -> None:
        """Open the memory of ``count`` jobs."""
        self.variables = {VARIABLE: str(path)}
        self.count = count
        self._places = _mapped(path)
        self._seen = 0

    def all_started(self, count: int | None = None) -> bool:
        """Tell whether the first ``count`` jobs have started; all of them by default."""
        wanted = self.count if count is None else count
        while self._seen < wanted and self._places[self._seen]:
            self._seen += 1
        return self._seen >= wanted

    def start_of(self, number: int) -> float:
        """Return when a job started, by the monotonic clock; 0.0: it has not."""
        return float(self._places[number])


@contextmanager
def new_stamps(folder: Path, count: int) -> Iterator[Stamps]:
    """Create memory for ``count`` jobs."""
    path = folder / f"stamps-{time.monotonic_ns()}"
    path.write_bytes(bytes(_BYTES * count))
    try:
        yield Stamps(path, count)
    finally:
        path.unlink()


def _mapped(path: Path) -> Places:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
