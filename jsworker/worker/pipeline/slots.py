"""Job slots: who runs now, who waits for a slot, and how much more may be claimed."""

import math
from collections import Counter, deque
from collections.abc import Callable

from jsworker.core.clock import boottime
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.run import Run

_AHEAD_SECONDS = 0.1
"""Only what should start within this time is claimed ahead; the rest stays in JetStream for others."""

_AHEAD_JOBS = 200
"""And never more than this."""

_SETTLING_JOBS = 2000
"""Outcomes on their way to the database; beyond that the database is the bottleneck: nothing is claimed."""

_WEIGHT = 0.05
"""Of one run in the moving average of a kind's run time."""


_SHORTEST_SECONDS = 1e-6


class Slots:
    """The job slots of a process. A slot is held while ``process`` runs, not while its outcome is settled."""

    def __init__(self, capacity: int, kinds: int, launch: Callable[[Run], None]) -> None:
        """Prepare ``capacity`` slots for so many ``kinds``; ``launch`` starts a run that got one."""
        self._capacity = capacity
        self._kinds = kinds
        self._launch = launch
        self._waiting: dict[str, deque[Run]] = {}
        """By kind; the kind that was served last stands last."""
        self._running: Counter[str] = Counter()
        self._taken = 0
        self._in_hand = 0
        """Runs that wait or run."""
        self._mean_seconds: dict[str, float] = {}
        self._settling = 0
        self._closed = False

    def room(self, kind: Kind, *, claiming: int, claiming_kind: int) -> int:
        """Return how many more jobs of a kind may be claimed now.

        Args:
            kind: the kind.
            claiming: claims of any kind on their way.
            claiming_kind: those of this kind.
        """
        if self._closed or self._settling >= _SETTLING_JOBS:
            return 0
        ahead = self._ahead(kind)
        in_line = claiming_kind + len(self._waiting.get(kind.name, ()))
        free = self._capacity + ahead - claiming - self._in_hand
        if ahead:  # slots fall free quickly: each kind has its place in the line, however long others' are
            free = max(free, self._share(kind, ahead) - in_line)
        own_ahead = min(ahead, _soon(kind.concurrency / self._mean_seconds.get(kind.name, math.inf)))
        return min(free, kind.concurrency + own_ahead - in_line - self._running[kind.name])

    def most(self, kind: Kind) -> int:
        """Return how many jobs of a kind may be in hand now, some of them ahead, if no other kind has any."""
        ahead = self._ahead(kind)
        own_ahead = min(ahead, _soon(kind.concurrency / self._mean_seconds.get(kind.name, math.inf)))
        return min(self._capacity + ahead, kind.concurrency + own_ahead)

    @property
    def serve_one_kind(self) -> bool:
        """Whether all jobs of the process are of one kind."""
        return self._kinds == 1

    def add(self, run: Run) -> None:
        """Start a run as soon as there is a slot for it."""
        self._waiting.setdefault(run.kind.name, deque()).append(run)
        self._in_hand += 1
        self._fill()

    def leave(self, run: Run, seconds: float) -> None:
        """Take the slot of a run whose processor has ended after ``seconds``; the run goes on to settle."""
        name = run.kind.name
        self._running[name] -= 1
        self._taken -= 1
        self._in_hand -= 1
        self.settling()
        mean = self._mean_seconds.get(name, seconds)
        self._mean_seconds[name] = max(mean + _WEIGHT * (seconds - mean), _SHORTEST_SECONDS)
        self._fill()

    def close(self) -> None:
        """Start nothing any more; what waits is taken out by ``take_waiting``."""
        self._closed = True

    def settling(self) -> None:
        """Note that an outcome is on its way."""
        self._settling += 1

    def settled(self) -> bool:
        """Note that a run's outcome has been settled; tell whether that makes room."""
        self._settling -= 1
        return self._settling == _SETTLING_JOBS - 1

    def take_waiting(self, *, older_than: float = 0.0) -> list[Run]:
        """Take runs out that have waited for a slot for at least ``older_than`` seconds."""
        now = boottime()
        taken: list[Run] = []
        for name, queue in self._waiting.items():
            while queue and now - queue[0].claimed_at >= older_than:
                taken.append(queue.popleft())
                self._in_hand -= 1
                # Runs take longer than the mean says: until one has ended, nothing more is claimed ahead.
                self._mean_seconds.pop(name, None)
        return taken

    def _ahead(self, kind: Kind) -> int:
        """Return how many job slots fall free soon, if those that are free now are given to this kind."""
        per_second, free = 0.0, self._capacity
        for name, running in self._running.items():
            free -= running
            per_second += running / self._mean_seconds.get(name, math.inf)
        return _soon(per_second + free / self._mean_seconds.get(kind.name, math.inf))

    def _share(self, kind: Kind, ahead: int) -> int:
        known = kind.name in self._mean_seconds  # else one run shows how long they take
        return max(1, ahead // self._kinds) if known else 1

    def _fill(self) -> None:
        if self._closed:
            return
        while self._taken < self._capacity and (run := self._next_run()) is not None:
            self._running[run.kind.name] += 1
            self._taken += 1
            self._launch(run)

    def _next_run(self) -> Run | None:
        """Take the next run that may have a slot, kind after kind, so that none starves behind another."""
        for name, queue in self._waiting.items():
            if queue and self._running[name] < queue[0].kind.concurrency:
                if len(self._waiting) > 1:
                    self._waiting[name] = self._waiting.pop(name)
                return queue.popleft()
        return None


def _soon(per_second: float) -> int:
    return int(min(_AHEAD_JOBS, per_second * _AHEAD_SECONDS))
