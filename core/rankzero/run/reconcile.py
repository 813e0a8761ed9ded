"""What an existing run means to whoever comes back for it."""

from __future__ import annotations

ATTACH, CONTINUE, FRESH = "attach", "continue", "fresh"


def on_resubmit(state: str, delivered: bool) -> str:
    """What submitting an existing run id means.

    Args:
        state: The run's state, ``"failed"`` if its driver died.
        delivered: The result of the submission that ``job.json`` names was handed on.

    Returns:
        `ATTACH` to a run that lives or whose result waits; `CONTINUE` a failed or cancelled one from its last
        checkpoint; train `FRESH` after a delivered one.
    """
    if state not in ("succeeded", "failed", "cancelled"):
        return ATTACH
    if delivered:
        # Also if a submission after it died half-way.
        return FRESH
    return ATTACH if state == "succeeded" else CONTINUE
