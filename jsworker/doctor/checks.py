"""All checks, in the order in which they are shown."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from jsworker.doctor import job_checks, nats_checks, postgresql_checks, settings_checks, table_checks
from jsworker.doctor.finding import Finding, Remark, unchecked
from jsworker.doctor.gather import Facts, Unknown

Judge = Callable[..., Iterable[Remark]]

_JUDGES: Final[dict[str, tuple[Judge, ...]]] = {
    "settings": (settings_checks.variables, settings_checks.recovery, settings_checks.shutdown),
    "postgresql": (
        postgresql_checks.connection,
        postgresql_checks.version,
        postgresql_checks.migration,
        postgresql_checks.standby,
        postgresql_checks.durability,
        postgresql_checks.role,
        postgresql_checks.rights,
        postgresql_checks.encryption,
        postgresql_checks.pooler,
        postgresql_checks.connections,
        postgresql_checks.transactions,
    ),
    "tables": (table_checks.indexes, table_checks.constraints),
    "jobs": (
        job_checks.workers,
        job_checks.time_limits,
        job_checks.outbox,
        job_checks.promotion,
        job_checks.queues,
        job_checks.owners,
        job_checks.refused_rows,
        job_checks.failures,
        job_checks.pruning,
        job_checks.dead_messages,
    ),
    "nats": (
        nats_checks.connection,
        nats_checks.version,
        nats_checks.jetstream,
        nats_checks.encryption,
        nats_checks.publishing,
        nats_checks.sync_interval,
        nats_checks.stream,
        nats_checks.pairing,
        nats_checks.replicas,
        nats_checks.consumers,
        nats_checks.subjects,
        nats_checks.service,
    ),
}
"""By area. A check is called what its function is called, and needs the facts that its parameters name."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: the area, a dot, and what is checked.
        judge: judges the facts that its parameters name, or all of them as ``facts``; as long as one of
            those that it names is unknown, the check is not made.
    """

    name: str
    judge: Judge

    def findings(self, facts: Facts) -> list[Finding]:
        """Return what this check finds."""
        return [Finding(self.name, *remark) for remark in self._remarks(facts)]

    def _remarks(self, facts: Facts) -> Iterable[Remark]:
        needs = inspect.signature(self.judge).parameters
        given: list[Any] = [facts if name == "facts" else getattr(facts, name) for name in needs]
        unknown = next((each for each in given if isinstance(each, Unknown)), None)
        return self.judge(*given) if unknown is None else [unchecked(unknown.because)]


CHECKS: Final = tuple(
    Check(f"{area}.{judge.__name__}", judge) for area, judges in _JUDGES.items() for judge in judges
)


def examine(facts: Facts) -> list[Finding]:
    """Return what all checks find, in their order."""
    return [finding for check in CHECKS for finding in check.findings(facts)]
