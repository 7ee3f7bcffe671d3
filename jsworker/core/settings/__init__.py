"""Settings: the environment variables ``JSWORKER_…``, their rules, and one clear line for each fault."""

from jsworker.core.settings.loading import check_timing, load_settings, unknown_variables
from jsworker.core.settings.model import RECOVERY_RULES, Settings
from jsworker.core.settings.variables import redact_url, variable_of

__all__ = [
    "RECOVERY_RULES",
    "Settings",
    "check_timing",
    "load_settings",
    "redact_url",
    "unknown_variables",
    "variable_of",
]
