"""The trace of a submitter, which its runs continue: W3C's trace context, as OpenTelemetry uses it."""

from __future__ import annotations

import os
import re
import sys

TRACEPARENT = "TRACEPARENT"
"""Environment variable with the trace context of a process."""

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def environment() -> dict[str, str]:
    """Returns `TRACEPARENT` for the ranks: this process's current span, else its own variable; empty if it has none."""
    given = os.environ.get(TRACEPARENT, "")
    if trace := sys.modules.get("opentelemetry.trace"):
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            given = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return {TRACEPARENT: given} if _FORM.fullmatch(given) else {}
