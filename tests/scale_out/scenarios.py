"""Servers that are restarted, killed and replaced under load; each scenario returns its figures."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsworker.core.settings import Settings
from tests.scale_out.load import Load, Outcome, outcome_of
from tests.scale_out.nats_cluster import SIZE, Cluster
from tests.scale_out.pods import Pods, pods_of
from tests.scale_out.replication import Pair, ask, replicated
from tests.support.polling import eventually

PODS = 2
_ENDS_SECONDS = 60.0
_NOTICED_SECONDS = 60.0


@dataclass(frozen=True)
class Figures:
    """What a scenario has shown.

    Attributes:
        moments: when a server was taken away, in seconds since 1970.
        switched: seconds from there until a standby took writes; None: there is none.
        changes: what the workers have logged as ``database.changed``.
        log: everything that the pods have logged.
    """

    outcome: Outcome
    moments: list[float]
    switched: float | None
    changes: list[dict[str, Any]]
    log: str

    def seconds(self) -> list[float]:
        """Return for each moment the seconds to the first completion of a job that was enqueued after it."""
        return [self.outcome.first_new_after(moment) for moment in self.moments]


async def nodes_restarted(
    cluster: Cluster, folder: Path, *, timing: Mapping[str, Any], rate: float, lame_duck: bool, between: int
) -> Figures:
    """One node after another is stopped in order and started again, each when the one before has caught up.

    Args:
        cluster: the servers.
        folder: records and logs.
        timing: the workers' settings.
        rate: jobs a second.
        lame_duck: whether clients are sent away one by one.
        between: jobs that are enqueued between two restarts.
    """
    settings = _cluster_settings(cluster, timing)
    moments = []
    with pods_of(folder, settings) as pods:
        await pods.start(PODS)
        await cluster.healthy()
        async with Load(Settings(**settings), rate=rate) as load:
            await load.enqueued(between)
            for node in cluster.stores.nodes:
                moments.append(time.time())
                await cluster.restart(node, lame_duck=lame_duck)
                await load.enqueued(between)
        outcome = await _cluster_outcome(cluster, load)
        return Figures(outcome, moments, None, pods.lines("database.changed"), pods.log)


async def leader_killed(
    cluster: Cluster, folder: Path, *, timing: Mapping[str, Any], rate: float, kills: int, between: int
) -> Figures:
    """SIGKILL of the node that leads the stream, again and again, each time it is back and has caught up."""
    settings = _cluster_settings(cluster, timing)
    moments = []
    with pods_of(folder, settings) as pods:
        await pods.start(PODS)
        await cluster.healthy()
        async with Load(Settings(**settings), rate=rate) as load:
            await load.enqueued(between)
            for _ in range(kills):
                leader = await cluster.leader_of(settings["stream"])
                leader.kill()
                moments.append(time.time())
                await load.enqueued(between)
                await asyncio.to_thread(leader.start)
                await cluster.healthy()
                await load.enqueued(between)
        outcome = await _cluster_outcome(cluster, load)
        return Figures(outcome, moments, None, pods.lines("database.changed"), pods.log)


async def standby_promoted(
    folder: Path, nats_url: str, *, timing: Mapping[str, Any], rate: float, between: int, silent: bool
) -> Figures:
    """The primary goes under load and never comes back; the synchronous standby takes over.

    Args:
        folder: records and logs.
        nats_url: where the stream is.
        timing: the workers' settings.
        rate: jobs a second.
        between: jobs that are enqueued before and after.
        silent: the primary is not killed but frozen: connections to it are not refused, nor ended.
    """
    async with replicated(synchronous=True) as pair:
        settings = pair_settings(pair, nats_url, timing)
        with pods_of(folder, settings) as pods:
            await pods.start(PODS)
            async with Load(Settings(**settings), rate=rate) as load:
                await load.enqueued(between)
                if silent:
                    pair.freeze_primary()
                else:
                    pair.primary.kill()
                moment = time.time()
                await asyncio.to_thread(pair.standby.promote)
                switched = time.time() - moment
                await load.enqueued(between)

            async def query(statement: str, ids: Sequence[str]) -> list[tuple[Any, ...]]:
                return await ask(pair.standby, statement, ids)

            outcome = await outcome_of(load, query, seconds=_ENDS_SECONDS)
            changes = await changes_told(pods)
            return Figures(outcome, [moment], switched, changes, pods.log)


async def changes_told(pods: Pods) -> list[dict[str, Any]]:
    """Wait until every worker has noticed the failover: one that saw no outage looks now and then."""

    async def told() -> list[dict[str, Any]]:
        lines = pods.lines("database.changed")
        assert len(lines) >= PODS, pods.log
        return lines

    return await eventually(told, seconds=_NOTICED_SECONDS)


def pair_settings(pair: Pair, nats_url: str, timing: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings on a pair, and on a stream of their own."""
    return {"database_url": pair.url, "nats_url": nats_url, **_new_stream(), **timing}


def _cluster_settings(cluster: Cluster, timing: Mapping[str, Any]) -> dict[str, Any]:
    stores = cluster.stores
    servers = {"database_url": stores.database_url, "nats_url": stores.nats_url, "stream_replicas": SIZE}
    return {**servers, **_new_stream(), **timing}


def _new_stream() -> dict[str, str]:
    name = f"scale-{secrets.token_hex(4)}"
    return {"stream": name, "subject_prefix": name}


async def _cluster_outcome(cluster: Cluster, load: Load) -> Outcome:
    async def query(statement: str, ids: Sequence[str]) -> list[tuple[Any, ...]]:
        return await cluster.stores.execute(statement, ids)

    return await outcome_of(load, query, seconds=_ENDS_SECONDS)
