"""Checks of the settings; that each is right, and fits the others, was a condition of getting here."""

import os
from collections.abc import Iterator

from jsworker.core.settings import RECOVERY_RULES, Settings, unknown_variables
from jsworker.doctor.finding import Remark, info, ok, seconds, warning


def variables(settings: Settings) -> Iterator[Remark]:
    """Names of variables that nobody reads."""
    unknown = unknown_variables()
    for line in unknown:
        yield warning(line, "Correct the variable's name, or remove it.")
    if not unknown:
        yield ok(f"every variable is a setting; log level {settings.log_level}")


def timing(settings: Settings) -> Iterator[Remark]:
    """The relations between durations, which hold here, and what follows from them."""
    crash = settings.crash_threshold
    noticed = "only after the stale threshold" if crash is None else f"within {_recovery(settings):g} s"
    is_on = all(settings.recovers_by()[rule] for rule in ("crashed", "stale"))
    yield ok(
        f"every timing rule holds: heartbeat {settings.heartbeat_interval:g} s, "
        f"stale {settings.stale_threshold:g} s, ack wait {settings.ack_wait:g} s"
        + (f"; the jobs of a vanished worker are taken back {noticed}" if is_on else "")
    )
    if crash is None:
        yield info(
            f"JSWORKER_CRASH_THRESHOLD is none: a vanished worker is noticed after "
            f"{settings.stale_threshold:g} s of silence only",
            "Leave it at its default, unless workers may not answer each other on NATS.",
        )


def recovery(settings: Settings) -> Iterator[Remark]:
    """Whether workers take back by themselves what dead ones hold."""
    off = [rule for rule, is_on in settings.recovers_by().items() if not is_on]
    for rule in off:
        yield warning(
            f"recovery by rule {rule} is off: not taken back are {RECOVERY_RULES[rule]}",
            "Use `jsworker clear --stale-for SECONDS --reason …`, or set JSWORKER_RECOVERY=on; "
            "JSWORKER_RECOVER_ON_START=true.",
        )
    if not off:
        yield ok("workers take back what dead ones hold, by every rule")


def shutdown(settings: Settings) -> Iterator[Remark]:
    """Whether the time that a pod gets to end is known, so that the rule about it was checked."""
    needs = settings.shutdown_timeout + 2 * settings.statement_timeout
    if settings.grace_period is not None:
        yield ok(f"shutting down takes {needs:g} s at most, the pod gets {settings.grace_period:g} s")
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        yield warning(
            f"JSWORKER_GRACE_PERIOD is not set, so nobody has checked that the pod gets the {needs:g} s "
            "that shutting down may take",
            "Set it to the pod's terminationGracePeriodSeconds.",
        )
    else:
        yield ok(f"shutting down takes {needs:g} s at most: whoever stops workers must wait for so long")


def retention(settings: Settings) -> Iterator[Remark]:
    """How long ended jobs are kept."""
    if settings.retention is None:
        yield info(
            "JSWORKER_RETENTION is none: ended jobs are kept for ever",
            "Set it, or run `jsworker prune --older-than SECONDS` now and then.",
        )
    else:
        yield ok(f"ended jobs are kept for {seconds(settings.retention)}")


def _recovery(settings: Settings) -> float:
    """Return the protocol's bound for two witnesses."""
    return (settings.crash_threshold or 0.0) + 1.2 * settings.scan_interval + 1
