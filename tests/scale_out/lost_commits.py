"""A failover that loses commits, made on purpose: every state that a job can go back to."""

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from jsworker import JobClient, enqueue_statement
from jsworker.core.settings import Settings
from tests.faults.journal import read_journals
from tests.scale_out.pods import Pods, pods_of
from tests.scale_out.replication import Pair, ask, replicated
from tests.scale_out.scenarios import PODS, changes_told, pair_settings
from tests.support.polling import eventually

_STATUS = "SELECT count(*) FROM jsworker.jobs WHERE id = ANY(%s::uuid[]) AND status = %s"
_MARKED = "SELECT count(*) FROM jsworker.jobs WHERE id = ANY(%s::uuid[]) AND NOT needs_publish"
_STEP_SECONDS = 30.0
"""For what should take one or two: the machine may be busy."""
_MINUTES = 150.0
"""For what takes a minute at default settings: orphaned claims, messages without a row."""


@dataclass
class Groups:
    """Jobs by what the standby knew of them when the replication was cut, and what happened to them then.

    Attributes:
        ended: completed before.
        lasting: running, and still running when the standby took over.
        running: running; completed on the primary alone.
        unpublished: not yet published; published, claimed and completed on the primary alone.
        queued: published; claimed and completed on the primary alone.
        claimed: published; claimed on the primary alone, and still running when the standby took over.
        vanished: enqueued and completed on the primary alone.
        vanished_running: enqueued and claimed on the primary alone, and still running.
        vanished_queued: enqueued and published on the primary alone, and not yet claimed.
    """

    ended: list[str] = field(default_factory=list)
    lasting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    unpublished: list[str] = field(default_factory=list)
    queued: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    vanished_running: list[str] = field(default_factory=list)
    vanished_queued: list[str] = field(default_factory=list)

    @property
    def kept(self) -> list[str]:
        """Jobs whose rows the standby has."""
        kept = (self.ended, self.lasting, self.running, self.unpublished, self.queued, self.claimed)
        return [job for group in kept for job in group]

    @property
    def gone(self) -> list[str]:
        """Jobs that PostgreSQL has lost."""
        return [*self.vanished, *self.vanished_running, *self.vanished_queued]


@dataclass(frozen=True)
class Aftermath:
    """What was found when everything had ended.

    Attributes:
        tokens: the tokens of each job's runs, in the order of their beginning.
        rows: status and token of each job that the database knows.
        completions: how often each job was completed in the history that has survived.
        dead: ids of the jobs whose messages were put aside.
        changes: what the workers have logged as ``database.changed``.
        seconds: from the primary's end until everything that was kept had ended, all gates open.
        restarted: how many worker processes were started, the first ones among them.
    """

    groups: Groups
    tokens: dict[str, list[int]]
    rows: dict[str, tuple[str, int]]
    completions: dict[str, int]
    dead: set[str]
    changes: list[dict[str, Any]]
    seconds: float
    restarted: int
    log: str


class Failover:
    """One such failover, step by step."""

    def __init__(self, pair: Pair, pods: Pods, client: JobClient, folder: Path) -> None:
        self._pair = pair
        self._pods = pods
        self._client = client
        self._folder = folder
        self._early, self._late = folder / "gate-early", folder / "gate-late"
        self.groups = Groups()

    async def prepare(self) -> None:
        """Make jobs in every state, let the standby see them, and cut it off."""
        groups = self.groups
        groups.ended = await self._enqueue("booked", 10)
        groups.running = await self._enqueue("held", 4, gate=str(self._early))
        groups.lasting = await self._enqueue("held", 4, gate=str(self._late))
        await self._reach(groups.ended, "completed")
        await self._reach([*groups.running, *groups.lasting], "processing")
        async with self._frozen():
            groups.unpublished = await self._enqueue_unpublished(5)
            groups.queued = await self._enqueue("booked", 10)
            groups.claimed = await self._enqueue("held", 4, gate=str(self._late))
            await self._marked(groups.queued + groups.claimed)
            await self._pair.caught_up()
            await self._pair.cut()

    async def lose(self) -> float:
        """Work on with the primary alone, kill it, and return when that was, in seconds since 1970."""
        groups = self.groups
        self._early.touch()
        groups.vanished = await self._enqueue("booked", 6)
        groups.vanished_running = await self._enqueue("held", 2, gate=str(self._late))
        await self._reach(
            [*groups.running, *groups.unpublished, *groups.queued, *groups.vanished], "completed"
        )
        await self._reach([*groups.lasting, *groups.claimed, *groups.vanished_running], "processing")
        async with self._frozen():
            groups.vanished_queued = await self._enqueue("brief", 5)
            moment = time.time()
            self._pair.primary.kill()
            await asyncio.to_thread(self._pair.standby.promote)
        return moment

    async def recover(self) -> None:
        """Wait until what was lost has been noticed, let every run end, and wait for the jobs."""
        stopped = {*self.groups.claimed, *self.groups.vanished_running}

        async def noticed() -> None:
            lost = {line["job"] for line in self._journal() if line["what"] == "lost"}
            assert stopped <= lost, f"not noticed: {stopped - lost}; {self._pods.log}"

        await eventually(noticed, seconds=_STEP_SECONDS)
        self._late.touch()
        await self._reach(self.groups.kept, "completed", on_standby=True, seconds=_MINUTES)

    async def put_aside(self) -> set[str]:
        """Wait until the messages of vanished rows are dead messages and return whose they were."""

        async def dead() -> set[str]:
            found = await ask(
                self._pair.standby, "SELECT convert_from(data, 'UTF8') FROM jsworker.dead_messages"
            )
            ids = {job for job in self.groups.gone for (text,) in found if job in text}
            assert ids >= set(self.groups.vanished_queued), f"{len(ids)} dead messages; {self._pods.log}"
            return ids

        return await eventually(dead, seconds=_MINUTES)

    def tokens(self) -> dict[str, list[int]]:
        """Return the tokens of all runs by job."""
        tokens: defaultdict[str, list[int]] = defaultdict(list)
        for line in self._journal():
            if line["what"] == "begin":
                tokens[line["job"]].append(line["token"])
        return dict(tokens)

    def _journal(self) -> list[dict[str, Any]]:
        return read_journals(self._folder, "run")

    async def _enqueue(self, kind: str, count: int, **payload: Any) -> list[str]:
        values = {"seconds": 0.0, **payload}
        return [str((await self._client.enqueue(kind, values)).id) for _ in range(count)]

    async def _enqueue_unpublished(self, count: int) -> list[str]:
        """Enqueue in a transaction of one's own; the workers publish it, once they are awake again."""
        engine = create_async_engine(self._client.database.url)
        try:
            async with AsyncSession(engine) as session, session.begin():
                new = [enqueue_statement("brief", {"seconds": 0.0}) for _ in range(count)]
                return [str((await session.execute(statement)).one()[0]) for statement in new]
        finally:
            await engine.dispose()

    async def _reach(
        self, jobs: Sequence[str], status: str, *, on_standby: bool = False, seconds: float = _STEP_SECONDS
    ) -> None:
        server = self._pair.standby if on_standby else self._pair.primary

        async def reached() -> None:
            [(count,)] = await ask(server, _STATUS, list(jobs), status)
            assert count == len(jobs), f"{count} of {len(jobs)} {status}; {self._pods.log}"

        await eventually(reached, seconds=seconds)

    async def _marked(self, jobs: Sequence[str]) -> None:
        """Wait until the client has noted that the messages are in the stream."""

        async def marked() -> None:
            [(count,)] = await ask(self._pair.primary, _MARKED, list(jobs))
            assert count == len(jobs)

        await eventually(marked, seconds=_STEP_SECONDS)

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[None]:
        """Hold every worker still: nothing is claimed, published or marked meanwhile."""
        self._pods.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._pods.send(signal.SIGCONT)


async def lose_commits(
    folder: Path, nats_url: str, *, timing: Mapping[str, Any], no_row_seconds: float | None
) -> Aftermath:
    """Cut a standby off, go on with the primary alone, kill it, promote the standby.

    Args:
        folder: records and logs.
        nats_url: where the stream is.
        timing: the workers' settings.
        no_row_seconds: how long a message waits for its row; None: as shipped, a minute.
    """
    async with replicated(synchronous=False) as pair:
        settings = pair_settings(pair, nats_url, timing)
        with pods_of(folder, settings, no_row_seconds=no_row_seconds) as pods:
            await pods.start(PODS)
            async with JobClient(Settings(**settings)) as client:
                failover = Failover(pair, pods, client, folder)
                await failover.prepare()
                moment = await failover.lose()
                await failover.recover()
                seconds = time.time() - moment
                dead = await failover.put_aside()
            jobs = failover.groups.kept + failover.groups.gone
            rows = await ask(
                pair.standby,
                "SELECT id::text, status, fencing_token FROM jsworker.jobs WHERE id = ANY(%s::uuid[])",
                jobs,
            )
            completions = await ask(
                pair.standby,
                "SELECT job_id::text, count(*) FROM faults.moves WHERE now = 'completed' GROUP BY job_id",
            )
            return Aftermath(
                groups=failover.groups,
                tokens=failover.tokens(),
                rows={job: (status, token) for job, status, token in rows},
                completions=dict(completions),
                dead=dead,
                changes=await changes_told(pods),
                seconds=seconds,
                restarted=len(pods.lines("child.started")),
                log=pods.log,
            )
