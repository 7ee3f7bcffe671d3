"""All checks, in the order in which they are shown, and what each needs to know."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jsworker.doctor import clocks, jobs, nats, postgresql, settings, stream, tables
from jsworker.doctor.facts import Facts, Unknown
from jsworker.doctor.finding import Finding, Remark, unchecked


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: the area, a dot, and what is checked.
        judge: judges the facts that it needs; one that needs none by name gets all of them.
        needs: names of facts; as long as one is unknown, the check is not made.
    """

    name: str
    judge: Callable[..., Iterable[Remark]]
    needs: tuple[str, ...] = ()

    def findings(self, facts: Facts) -> list[Finding]:
        """Return what this check finds."""
        return [Finding(self.name, *remark) for remark in self._remarks(facts)]

    def _remarks(self, facts: Facts) -> Iterable[Remark]:
        given: list[Any] = [getattr(facts, name) for name in self.needs]
        unknown = next((each for each in given if isinstance(each, Unknown)), None)
        if unknown is not None:
            return [unchecked(unknown.because)]
        return self.judge(*given) if self.needs else self.judge(facts)


CHECKS = (
    Check("settings.variables", settings.variables, ("settings",)),
    Check("settings.timing", settings.timing, ("settings",)),
    Check("settings.recovery", settings.recovery, ("settings",)),
    Check("settings.shutdown", settings.shutdown, ("settings",)),
    Check("settings.retention", settings.retention, ("settings",)),
    Check("postgresql.connection", postgresql.connection),
    Check("postgresql.version", postgresql.version, ("server",)),
    Check("postgresql.migration", postgresql.migration, ("revision",)),
    Check("postgresql.standby", postgresql.standby, ("server",)),
    Check("postgresql.durability", postgresql.durability, ("server",)),
    Check("postgresql.replication", postgresql.replication, ("server",)),
    Check("postgresql.isolation", postgresql.isolation, ("server",)),
    Check("postgresql.encoding", postgresql.encoding, ("server",)),
    Check("postgresql.role", postgresql.role, ("server",)),
    Check("postgresql.rights", postgresql.rights, ("rights", "server")),
    Check("postgresql.encryption", postgresql.encryption, ("link",)),
    Check("postgresql.pooler", postgresql.pooler, ("link",)),
    Check("postgresql.connections", postgresql.connections, ("server", "link", "rows", "settings")),
    Check("postgresql.transactions", postgresql.transactions, ("oldest", "server")),
    Check("postgresql.idle_transactions", postgresql.idle_transactions, ("server",)),
    Check("tables.indexes", tables.indexes, ("schema",)),
    Check("tables.index_use", tables.index_use, ("schema",)),
    Check("tables.constraints", tables.constraints, ("schema",)),
    Check("tables.vacuum", tables.vacuum, ("schema", "server")),
    Check("tables.fillfactor", tables.fillfactor, ("schema",)),
    Check("jobs.workers", jobs.workers, ("rows",)),
    Check("jobs.time_limits", jobs.time_limits, ("rows", "settings")),
    Check("jobs.registry", jobs.registry, ("rows",)),
    Check("jobs.outbox", jobs.outbox, ("rows",)),
    Check("jobs.promotion", jobs.promotion, ("rows",)),
    Check("jobs.queues", jobs.queues, ("rows",)),
    Check("jobs.owners", jobs.owners, ("rows",)),
    Check("jobs.refused_rows", jobs.refused_rows, ("rows",)),
    Check("jobs.failures", jobs.failures, ("rows",)),
    Check("jobs.pruning", jobs.pruning, ("rows", "settings")),
    Check("jobs.timelines", jobs.timelines, ("rows",)),
    Check("jobs.dead_messages", jobs.dead_messages, ("rows",)),
    Check("nats.connection", nats.connection),
    Check("nats.version", nats.version, ("nats",)),
    Check("nats.jetstream", nats.jetstream),
    Check("nats.encryption", nats.encryption, ("nats",)),
    Check("nats.payload", nats.payload, ("nats",)),
    Check("nats.storage", nats.storage),
    Check("nats.publishing", nats.publishing, ("refused",)),
    Check("nats.sync_interval", nats.sync_interval),
    Check("nats.stream", stream.shape),
    Check("nats.pairing", stream.pairing, ("stream", "rows", "settings")),
    Check("nats.replicas", stream.replicas, ("stream", "settings")),
    Check("nats.consumers", stream.consumers),
    Check("nats.subjects", stream.subjects, ("unconsumed",)),
    Check("nats.service", stream.service, ("consumers", "rows", "settings")),
    Check("clocks.postgresql", clocks.database, ("clock",)),
    Check("clocks.nats", clocks.stream_server),
)


def examine(facts: Facts) -> list[Finding]:
    """Return what all checks find, in their order."""
    return [finding for check in CHECKS for finding in check.findings(facts)]
