"""Job slots: which runs execute, which wait for a slot, and how much more may be claimed."""

import math
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from jsworker.core.clock import boottime
from jsworker.core.priorities import HIGH, LOW, NORMAL, WEIGHTS, Turns
from jsworker.worker.pipeline.in_flight import InFlight, Run
from jsworker.worker.pipeline.kinds import Kind

_PREFETCH_SECONDS = 0.2  # only jobs that should start so soon are prefetched; the rest is for others
# With the way to distant servers. Jobs claimed a second ago are handed back, and taken for begun (see reset).
# Where kinds or priorities take turns, jobs may wait for twice as long as they were asked for in advance.
_MOST_PREFETCH_SECONDS, _MOST_PREFETCH_SECONDS_IN_TURNS = 1.0, 0.5
_SLOWER = 1.1  # a claim that takes longer than the quickest ones is taken for a longer way only so slowly
_PREFETCH_JOBS = 200  # the most that are prefetched, unless more have just ended within that time
MOST_PREFETCH_JOBS = 4000
SETTLING_JOBS = 2000  # with so many unwritten outcomes nothing is claimed: the database is behind
_WEIGHT = 0.05  # the weight of one run in the moving average of a kind's run time
_SHORTEST_SECONDS = 1e-6


_LANES = (HIGH, NORMAL, LOW)
_QUARANTINE = len(_LANES)  # the number of the line of quarantined runs of every priority
_GRACE_SECONDS = 0.01  # only lanes of higher priority are asked for so long, for each such lane


class Lane(Protocol):
    """The source of jobs of one kind and priority."""

    kind: Kind
    priority: int

    @property
    def claiming(self) -> int:
        """The number of jobs that are being claimed."""

    @property
    def has_more(self) -> bool:
        """Whether there are more jobs, as far as is known."""


class Slots:
    """The job slots of a process. A slot is held while ``process`` runs, not while its outcome is settled.

    While jobs of several priorities wait, they start in turns of 8 : 3 : 1. Without a ``Lane`` of another
    priority than normal, priorities cost no time.
    """

    def __init__(
        self, capacity: int, kinds: int, in_flight: InFlight, *, isolated_processes: int = 1
    ) -> None:
        self._capacity = capacity
        self._isolated_processes = isolated_processes
        self._isolated = 0  # the number of runs of isolated kinds, which share the processes
        self._isolated_kinds: set[str] = set()
        self._kinds = kinds
        self._all = in_flight
        # By priority and kind; the kind that was served last is last. The last line is that of quarantine.
        self._waiting: tuple[dict[str, deque[Run]], ...] = ({}, {}, {}, {})
        self._in_line = [0, 0, 0, 0]  # the number of waiting runs, by priority
        self._starting: Run | None = None  # the quarantined run whose process is being started
        self._others_turn = False  # whether other runs get the next slot before a quarantined one
        self._turns = Turns()
        self._lanes: dict[str, list[Lane]] = {}  # by kind
        self._has_priorities = False
        self._running: Counter[str] = Counter()
        self._taken = 0
        self._unsettled = 0  # the number of runs that wait or run
        self._mean_seconds: dict[str, float] = {}
        self.is_closed = False
        """Whether no more runs get a slot."""
        self.is_drained = False
        """Whether an operator has drained this worker, so that it claims nothing more."""
        self._most_ahead = _PREFETCH_JOBS
        self._ended = 0
        self._counted_from = boottime()
        self._claim_seconds = math.inf  # the time of the quickest claims: the way to the database and back

    def note_claim(self, seconds: float) -> None:
        """Note how long a claim took: where the servers are far away, jobs are prefetched earlier."""
        self._claim_seconds = min(seconds, self._claim_seconds * _SLOWER)

    @property
    def prefetch_seconds(self) -> float:
        """How long before their start jobs are asked for: their messages and claims are on the way, too."""
        ways = 2 * self._claim_seconds if math.isfinite(self._claim_seconds) else 0.0
        most = _MOST_PREFETCH_SECONDS if self.serves_one else _MOST_PREFETCH_SECONDS_IN_TURNS
        return min(_PREFETCH_SECONDS + ways, most)

    def open_lane(self, lane: Lane) -> None:
        """Add a source of jobs."""
        self._lanes.setdefault(lane.kind.name, []).append(lane)
        self._has_priorities |= lane.priority != NORMAL
        if lane.kind.is_isolated:
            self._isolated_kinds.add(lane.kind.name)

    @property
    def serves_one(self) -> bool:
        """Whether all jobs are of one kind and of normal priority."""
        return self._kinds == 1 and not self._has_priorities

    def room(self, lane: Lane) -> int:
        """Return how many more jobs of a lane may be claimed.

        While other lanes have work, this is the lane's part of the room. Where jobs are prefetched, each lane
        may prefetch some even if many jobs of others wait, because they start in their own turn.
        """
        if not self._has_priorities:
            return self._room(lane.kind, lane.claiming)
        part = self._part(self._room_of_all(lane.kind), lane.priority)
        return max(part, self._own_place(lane) - lane.claiming)

    def takes_one(self, lane: Lane) -> bool:
        """Return whether a job whose message has already come may be claimed, even in another lane's turn."""
        if not self._has_priorities:
            return self._room(lane.kind, lane.claiming) > 0
        return self._room_of_all(lane.kind) > 0 or self._own_place(lane) > lane.claiming

    def awaits_turn(self, lane: Lane) -> bool:
        """Return whether there is room for the kind, but the next turn is another priority's."""
        has_room = self._has_priorities and self._room_of_all(lane.kind) > 0
        return has_room and self._part(1, lane.priority) == 0

    def gives_way(self, lane: Lane) -> float:
        """Return for how many seconds only jobs of higher priority should be asked for.

        A few milliseconds show whether there are any. That delay matters only for jobs as short as that, and
        those are prefetched.
        """
        if not self._has_priorities or self._prefetch(lane.kind):
            return 0.0
        higher = {each.priority for each in self._all_lanes() if each.priority < lane.priority}
        return _GRACE_SECONDS * len(higher)

    def _all_lanes(self) -> Iterator[Lane]:
        return chain.from_iterable(self._lanes.values())

    def _own_place(self, lane: Lane) -> int:
        """Return how many jobs of a lane may be prefetched or claimed even if others wait."""
        if self.is_closed or self._settling() >= SETTLING_JOBS or not (prefetch := self._prefetch(lane.kind)):
            return 0
        own = max(1, self._share(lane.kind, prefetch) * WEIGHTS[lane.priority] // sum(WEIGHTS))
        return own - self.waiting(lane)

    def _room_of_all(self, kind: Kind) -> int:
        """Return how many more jobs of a kind may be claimed, of any priority."""
        return self._room(kind, sum(lane.claiming for lane in self._lanes.get(kind.name, ())))

    def _part(self, room: int, priority: int) -> int:
        """Return how much of the room is for jobs of this priority: all of it if there are no others."""
        ahead = list(self._in_line)
        with_work: set[int] = set()
        for lane in self._all_lanes():
            ahead[lane.priority] += lane.claiming
            # A kind that has reached its limit leaves the slots to others.
            if lane.priority not in with_work and lane.has_more and self._room_of_all(lane.kind) > 0:
                with_work.add(lane.priority)
        return self._turns.part(priority, room, among=with_work, ahead=ahead)

    def _room(self, kind: Kind, claiming: int) -> int:
        if self.is_closed or self._settling() >= SETTLING_JOBS:
            return 0
        self._count_ended()
        prefetch = self._prefetch(kind)
        in_line = claiming + len(self._waiting[NORMAL].get(kind.name, ()))
        if self._in_line[HIGH] or self._in_line[LOW] or self._in_line[_QUARANTINE]:
            in_line += sum(len(self._waiting[lane].get(kind.name, ())) for lane in (HIGH, LOW, _QUARANTINE))
        # Runs that wait for quarantine take room from their own kind alone: their line is slow.
        taken = self._unsettled - self._in_line[_QUARANTINE]
        free = self._capacity + prefetch - len(self._all.claiming) + self._all.surplus - taken
        if kind.is_isolated:
            free = min(free, self._isolated_processes + prefetch - self._isolated_in_hand(kind, claiming))
        if prefetch:  # slots become free quickly: each kind gets some, even if many jobs of others wait
            free = max(free, self._share(kind, prefetch) - in_line)
        return min(free, self._most_of(kind, prefetch) - in_line - self._running[kind.name])

    def _isolated_in_hand(self, kind: Kind, claiming: int) -> int:
        """Return how many jobs of isolated kinds are being claimed (this one: ``claiming``), wait or run.

        Of those that wait for quarantine, only this kind's own count.
        """
        others = [lane for name in self._isolated_kinds - {kind.name} for lane in self._lanes[name]]
        lines = [self._waiting[priority] for priority in _LANES]
        waiting = sum(len(kinds.get(name, ())) for kinds in lines for name in self._isolated_kinds)
        waiting += len(self._waiting[_QUARANTINE].get(kind.name, ()))
        return claiming + sum(lane.claiming for lane in others) + waiting + self._isolated

    def most(self, kind: Kind) -> int:
        """Return how many jobs of a kind may be in flight without others, prefetched ones included."""
        prefetch = self._prefetch(kind)
        return min(self._capacity + prefetch, self._most_of(kind, prefetch))

    def waiting(self, lane: Lane) -> int:
        """Return how many runs of a lane wait for a slot, with those of its kind that wait for quarantine."""
        return sum(len(self._waiting[line].get(lane.kind.name, ())) for line in (lane.priority, _QUARANTINE))

    def add(self, run: Run) -> None:
        """Queue a run for a slot; ``next_run`` returns it in its turn."""
        # The priority of the row: its message may have come by another lane.
        priority = _QUARANTINE if run.quarantined else run.claimed.priority
        self._waiting[priority].setdefault(run.kind.name, deque()).append(run)
        self._in_line[priority] += 1
        self._unsettled += 1

    def next_run(self) -> Run | None:
        """Give a slot to the next run and return it; None if there is no slot or no run.

        The priorities take turns, and within each priority the kinds take turns, so that none starves.
        Quarantined runs get a slot only one at a time, until its process has started, and take turns with
        all others.
        """
        if self.is_closed or self._taken >= self._capacity:
            return None
        may_start = self._starting is None and self._in_line[_QUARANTINE] > 0
        if not may_start or self._others_turn:
            self._others_turn = False
            if (run := self._next_shared()) is not None or not may_start:
                return run
        if (run := self._next_of(_QUARANTINE)) is None:  # its kind has reached its limit
            return self._next_shared()
        self._starting, self._others_turn = run, True
        return run

    def _next_shared(self) -> Run | None:
        if not (self._has_priorities or self._in_line[HIGH] or self._in_line[LOW]):
            return self._next_of(NORMAL)
        for priority in self._turns.in_order(each for each in _LANES if self._in_line[each]):
            if (run := self._next_of(priority)) is not None:
                self._turns.take(priority)
                return run
        return None

    def _next_of(self, priority: int) -> Run | None:
        kinds = self._waiting[priority]
        for name, queue in kinds.items():
            if queue and self._may_run(queue[0].kind):
                if len(kinds) > 1:
                    kinds[name] = kinds.pop(name)
                self._running[name] += 1
                self._taken += 1
                self._isolated += queue[0].kind.is_isolated
                self._in_line[priority] -= 1
                return queue.popleft()
        return None

    def _may_run(self, kind: Kind) -> bool:
        if kind.is_isolated and self._isolated >= self._isolated_processes:
            return False
        return self._running[kind.name] < kind.concurrency

    @property
    def has_quarantined(self) -> bool:
        """Whether a quarantined run waits for a slot and has not been stopped."""
        return any(run.stop is None for queue in self._waiting[_QUARANTINE].values() for run in queue)

    def note_started(self, run: Run) -> None:
        """Let the next quarantined run have a slot: the process of this one has started, or never will."""
        if self._starting is run:
            self._starting = None

    def leave(self, run: Run, seconds: float) -> None:
        """Free the slot of a run whose processor has ended after ``seconds``; the run then settles."""
        self.note_started(run)
        name = run.kind.name
        self._running[name] -= 1
        self._taken -= 1
        self._isolated -= run.kind.is_isolated
        self._unsettled -= 1
        self._ended += 1
        mean = self._mean_seconds.get(name, seconds)
        self._mean_seconds[name] = max(mean + _WEIGHT * (seconds - mean), _SHORTEST_SECONDS)

    def close(self) -> None:
        """Give no more slots; ``take_waiting`` takes out the runs that wait."""
        self.is_closed = True

    @property
    def has_room_again(self) -> bool:
        """Whether the outcome that has just been settled makes room."""
        return self._settling() == SETTLING_JOBS - 1

    def take_waiting(self, *, older_than: float = 0.0) -> list[Run]:
        """Take out the runs that have waited for a slot for at least ``older_than`` seconds.

        While a process starts, as many as there are slots may wait longer for quarantine, unless it is 0; but
        those of them that were stopped are taken out at once.
        """
        now = boottime()
        taken: list[Run] = []
        for priority, name, queue in [
            (lane, *each) for lane, kinds in enumerate(self._waiting) for each in kinds.items()
        ]:
            # Those for which a turn is missing, not a slot, would be claimed again at once.
            await_turn = priority == _QUARANTINE and older_than > 0 and self._starting is not None
            for run in [run for run in queue if run.stop is not None] if await_turn else ():
                queue.remove(run)
                taken.append(run)
                self._in_line[priority] -= 1
                self._unsettled -= 1
            while (
                len(queue) > (self._capacity if await_turn else 0) and now - queue[0].claimed_at >= older_than
            ):
                taken.append(queue.popleft())
                self._in_line[priority] -= 1
                self._unsettled -= 1
                # Runs take longer than the mean: until one has ended, nothing more is prefetched.
                self._mean_seconds.pop(name, None)
        return taken

    def _settling(self) -> int:
        return len(self._all.runs) - self._unsettled

    def _prefetch(self, kind: Kind) -> int:
        """Return how many job slots become free soon, if this kind gets those that are free now.

        For an isolated kind, count isolated processes instead.
        """
        per_second, free = 0.0, self._isolated_processes if kind.is_isolated else self._capacity
        for name, running in self._running.items():
            if kind.is_isolated and name not in self._isolated_kinds:
                continue
            free -= running
            per_second += running / self._mean_seconds.get(name, math.inf)
        return self._soon(per_second + free / self._mean_seconds.get(kind.name, math.inf))

    def _most_of(self, kind: Kind, prefetch: int) -> int:
        """Return how many jobs the kind's own concurrency allows, prefetched ones included.

        While half as many wait for quarantine, nothing is prefetched: it might wait there, too, until it is
        handed back.
        """
        if 2 * len(self._waiting[_QUARANTINE].get(kind.name, ())) >= kind.concurrency:
            return kind.concurrency
        own_prefetch = self._soon(kind.concurrency / self._mean_seconds.get(kind.name, math.inf))
        return kind.concurrency + min(prefetch, own_prefetch)

    def _share(self, kind: Kind, prefetch: int) -> int:
        known = kind.name in self._mean_seconds  # if not, one run shows how long they take
        return max(1, prefetch // self._kinds) if known else 1

    def _soon(self, per_second: float) -> int:
        return int(min(self._most_ahead, per_second * self.prefetch_seconds))

    def _count_ended(self) -> None:
        """Allow more prefetching when more runs have ended: run times alone overrate a busy process."""
        now = boottime()
        if (passed := now - self._counted_from) >= _PREFETCH_SECONDS:
            ended = int(self._ended / passed * self.prefetch_seconds)
            self._most_ahead = min(MOST_PREFETCH_JOBS, max(_PREFETCH_JOBS, ended))
            self._ended, self._counted_from = 0, now
