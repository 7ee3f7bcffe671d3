"""All checks in the order in which they are shown, and the checks of the settings.

Rules for single settings and for their combinations are not repeated here: loading the settings checks them.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from jsworker.core.settings import RECOVERY_RULES, Settings, unknown_variables
from jsworker.doctor import job_checks, nats_checks, postgresql_checks
from jsworker.doctor.finding import Finding, error, info, ok, unchecked, warning
from jsworker.doctor.gather import NO_NATS, NO_POSTGRESQL, Facts, Unknown

Judge = Callable[..., Iterable[Finding]]


def variables() -> Iterator[Finding]:
    """Every variable is a setting."""
    for line in unknown_variables():
        yield warning(line, "Correct the variable's name, or remove it.")


def recovery(settings: Settings) -> Iterator[Finding]:
    """Workers take back by themselves what dead ones hold, by every rule."""
    for rule in (rule for rule, is_on in settings.recovers_by().items() if not is_on):
        yield warning(
            f"recovery by rule {rule} is off: not taken back are {RECOVERY_RULES[rule]}",
            "Use `jsworker clear --stale-for SECONDS --reason …`, or set JSWORKER_RECOVERY=on; "
            "JSWORKER_RECOVER_ON_START=true.",
        )
    if settings.crash_threshold is None:
        yield info(
            f"JSWORKER_CRASH_THRESHOLD is none: a vanished worker is noticed after "
            f"{settings.stale_threshold:g} s of silence only",
            "Leave it at its default, unless workers may not answer each other on NATS.",
        )


def shutdown(settings: Settings) -> Iterator[Finding]:
    """The time that a pod gets to end is known, so the rule about it was checked."""
    needs = settings.shutdown_timeout + 2 * settings.statement_timeout
    if settings.grace_period is not None:
        yield ok(f"shutting down takes {needs:g} s at most, the pod gets {settings.grace_period:g} s")
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        yield warning(
            f"JSWORKER_GRACE_PERIOD is not set, so it was not checked that the pod gets the {needs:g} s "
            "that shutting down may take",
            "Set it to the pod's terminationGracePeriodSeconds.",
        )
    else:
        yield ok(f"shutting down takes {needs:g} s at most, and workers must be given so long")


_JUDGES: Final[dict[str, tuple[Judge, ...]]] = {
    "settings": (variables, recovery, shutdown),
    "postgresql": postgresql_checks.CHECKS,
    "tables": postgresql_checks.TABLE_CHECKS,
    "jobs": job_checks.CHECKS,
    "nats": nats_checks.CHECKS,
}
_CURES: Final = {
    "postgresql.connection": "Check the host and port in JSWORKER_DATABASE_URL, that the server runs, and "
    "that this machine reaches it.",
    "nats.connection": "Check JSWORKER_NATS_URL and the login (JSWORKER_NATS_…), and that the server runs.",
}
"""What to do if the facts that these checks need could not be read."""
_CURES_BY_WORDS: Final = {
    "postgresql.connection": (
        (
            # PgBouncer's.
            ("query_wait_timeout", "server_login_retry", "cannot connect to server", "server down"),
            "The pooler answers but has no connection to PostgreSQL: see there whether it runs, and the log.",
        ),
        (
            ("max_client_conn", "no more connections allowed", "max client"),  # PgBouncer's and Supavisor's
            "Raise the pooler's limit of clients (PgBouncer: max_client_conn), or run fewer processes.",
        ),
        (
            ("too many", "connection slots", "SQLSTATE 53300"),
            "Raise max_connections or the role's limit, run fewer processes, or put PgBouncer between.",
        ),
        (
            ("statement timeout",),
            "Raise statement_timeout, or undo it: ALTER ROLE … RESET statement_timeout, or ALTER DATABASE ….",
        ),
        (
            ("no space left", "SQLSTATE 53100"),
            "Free space on the server's disk; workers go on by themselves.",
        ),
        (
            ("the database system is", "SQLSTATE 57P0"),
            "Wait until the server has started, then try again; its log tells what it does.",
        ),
        (
            (': database "', 'for database "', "no such database"),
            "Correct the database's name in JSWORKER_DATABASE_URL, or create it; let this role connect.",
        ),
        (
            ("refused the login", "no password supplied"),
            "Check the user in JSWORKER_DATABASE_URL, JSWORKER_DATABASE_PASSWORD, and pg_hba.conf.",
        ),
    ),
    "nats.connection": (
        (
            ("maximum connections", "max_connections"),
            "Raise max_connections in the nats-server's configuration, or run fewer processes.",
        ),
        (
            ("handshake_first", "did not answer"),
            "Check JSWORKER_NATS_URL, and that the server runs; if it has handshake_first: true, use auto.",
        ),
    ),
}
"""What to do, by words in the error: PostgreSQL's errors of connecting usually come without a SQLSTATE."""

CHECKS: Final = {f"{area}.{judge.__name__}": judge for area, judges in _JUDGES.items() for judge in judges}
"""Checks by name. A check is called with the facts that its parameters name (``facts``: all of them), but
not if one of these is unknown. If it finds nothing, its docstring is shown as the finding.
"""


def examine(facts: Facts) -> list[Finding]:
    """Return what all checks find, in their order."""
    return [found for name, judge in CHECKS.items() for found in found_by(name, judge, facts)]


def _what_holds(judge: Judge) -> str:
    says = (judge.__doc__ or judge.__name__).strip(" .\n")
    is_name = any(map(str.isupper, says.partition(" ")[0][1:]))  # VACUUM, PostgreSQL
    return says if is_name else says[0].lower() + says[1:]


def _cure(name: str, because: str) -> str:
    by_words = _CURES_BY_WORDS[name]
    fitting = (cure for words, cure in by_words if any(word.lower() in because.lower() for word in words))
    return next(fitting, _CURES[name])


def found_by(name: str, judge: Judge, facts: Facts) -> Iterator[Finding]:
    """Yield what one check finds."""
    needs = inspect.signature(judge).parameters
    given: list[Any] = [facts if need == "facts" else getattr(facts, need) for need in needs]
    unknown = next((each for each in given if isinstance(each, Unknown)), None)
    if unknown is None:
        found = list(judge(*given)) or [ok(_what_holds(judge))]
    elif name in _CURES:
        found = [error(unknown.because, _cure(name, unknown.because))]
    elif unknown in (facts.server, facts.nats):  # the check of the connection tells why
        found = [unchecked((NO_POSTGRESQL if unknown is facts.server else NO_NATS).because)]
    else:
        found = [unchecked(unknown.because, failed=unknown.failed)]
    for each in found:
        yield each._replace(check=name)
