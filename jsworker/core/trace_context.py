"""The context of a span, as it is stored in a job's row and sent in its message's headers."""

import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")


class TraceContext(NamedTuple):
    """A span's identity, in the two headers of W3C Trace Context; without a span it is empty."""

    traceparent: str | None = None
    tracestate: str | None = None

    def headers(self) -> dict[str, str] | None:
        """Return them as headers of a message; None: there are none, or the row holds another text."""
        if self.traceparent is None or not _TRACEPARENT.fullmatch(self.traceparent):
            return None
        found = {"traceparent": self.traceparent}
        has_state = self.tracestate is not None and _TRACESTATE.fullmatch(self.tracestate)
        return {**found, "tracestate": str(self.tracestate)} if has_state else found
