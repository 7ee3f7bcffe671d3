"""Checks of the settings; that each is right, and fits the others, was checked when they were loaded."""

import os
from collections.abc import Iterator

from jsworker.core.settings import RECOVERY_RULES, Settings, unknown_variables
from jsworker.doctor.finding import Remark, info, ok, warning


def variables(settings: Settings) -> Iterator[Remark]:
    """Names of variables that are no setting."""
    unknown = unknown_variables()
    for line in unknown:
        yield warning(line, "Correct the variable's name, or remove it.")
    if not unknown:
        yield ok(f"every variable is a setting; log level {settings.log_level}")


def recovery(settings: Settings) -> Iterator[Remark]:
    """Whether workers take back by themselves what dead ones hold."""
    off = [rule for rule, is_on in settings.recovers_by().items() if not is_on]
    for rule in off:
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
    elif not off:
        yield ok("workers take back what dead ones hold, by every rule")


def shutdown(settings: Settings) -> Iterator[Remark]:
    """Whether the time that a pod gets to end is known, so that the rule about it was checked."""
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
