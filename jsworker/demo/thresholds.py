"""The short times of the demo's workers, so that a recovery takes seconds to watch and not minutes."""

from types import MappingProxyType

from jsworker.core.settings import Settings
from jsworker.demo.snapshot import Threshold

SHORT = MappingProxyType(
    {
        "heartbeat_interval": 0.5,
        "statement_timeout": 0.4,
        "crash_threshold": 1.5,
        "stale_threshold": 2.0,
        "scan_interval": 0.5,
        "watchdog_timeout": 1.9,
        "relay_interval": 0.1,
        "ack_wait": 6.0,
        "shutdown_timeout": 2.0,
    }
)
"""Seconds by the name of the setting; they keep all timing rules."""

_SHOWN = (
    "heartbeat_interval",
    "statement_timeout",
    "crash_threshold",
    "stale_threshold",
    "watchdog_timeout",
    "scan_interval",
    "ack_wait",
)


def shown_thresholds() -> list[Threshold]:
    """Return the times that decide when a silent worker's jobs run again, beside their defaults."""
    return [
        Threshold(
            name.removesuffix("_interval")
            .removesuffix("_threshold")
            .removesuffix("_timeout")
            .replace("_", " "),
            SHORT[name],
            Settings.model_fields[name].default,
        )
        for name in _SHOWN
    ]
