"""What an existing run means to whoever comes back for it: one decision, for launcher and orchestrators alike."""

from __future__ import annotations

import enum

from rankzero.run.directory import FINAL_STATES


class Decision(enum.Enum):
    """What to do about an existing run."""

    ATTACH = "attach"
    """It lives: follow it."""

    DELIVER = "deliver"
    """It has succeeded and its result waits: deliver that."""

    RESUME = "resume"
    """Submit it again, from its last checkpoint; one that is still ending is waited for."""

    FRESH = "fresh"
    """Submit it again, from scratch; one that lives is ended first."""


def decide(
    state: str,
    *,
    same_training: bool,
    acknowledged: bool,
    ending: bool = False,
    same_generation: bool = False,
    by_name: bool = False,
) -> Decision:
    """Decides what an existing run means.

    Args:
        state: Of the run; ``"failed"`` if its driver died.
        same_training: It has the identity of the training that is asked for (`rankzero.submit.identity`).
        acknowledged: Its result was delivered, and the receiver has it for good.
        ending: It lives, and was asked to end, or the process that it was to end with has exited.
        same_generation: No user stands between the delivery of its result and this: an orchestrator repeats by itself
            what had succeeded.
        by_name: The name of a run alone says which one it continues, as in Ray Train: whatever has changed, and also
            after a success, it resumes from the last checkpoint.

    Example:
        >>> decide("failed", same_training=True, acknowledged=False)
        <Decision.RESUME: 'resume'>
    """
    if by_name and state in FINAL_STATES and (acknowledged or not same_training):
        return Decision.RESUME
    if not same_training:
        return Decision.FRESH
    if state not in FINAL_STATES:
        return Decision.RESUME if ending else Decision.ATTACH
    if acknowledged and not same_generation:
        # Also if a submission after it died before there was more of it than a status.
        return Decision.FRESH
    return Decision.DELIVER if state == "succeeded" else Decision.RESUME
