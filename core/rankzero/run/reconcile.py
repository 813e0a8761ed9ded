"""Decides what happens to an existing run when its run id is submitted again, for launcher and orchestrators alike."""

from __future__ import annotations

import enum

from rankzero.run.status import FINAL_STATES


class Decision(enum.Enum):
    """The action on an existing run."""

    ATTACH = "attach"
    """The run is running: follow it."""

    DELIVER = "deliver"
    """The run has succeeded and its result is not acknowledged: deliver the result."""

    RESUME = "resume"
    """Wait for the end of the run if it is ending, and submit it again from its last checkpoint."""

    FRESH = "fresh"
    """End the run if it is running, and submit it again from scratch."""


def decide(
    state: str,
    *,
    same_training: bool,
    acknowledged: bool,
    ending: bool = False,
    same_generation: bool = False,
    by_name: bool = False,
    unknown: bool = False,
) -> Decision:
    """Decides what to do about an existing run.

    Args:
        state: State of the run; ``"failed"`` if its driver died.
        same_training: The run has the identity of the requested training (`rankzero.submit.identity`).
        acknowledged: The result of the run was delivered, and the receiver has acknowledged it.
        ending: The run is running and was asked to stop, or the process that owned it has exited.
        same_generation: An orchestrator, and not a user, repeats a step that had succeeded.
        by_name: The name of a run alone decides that it is continued, as in Ray Train: it resumes from the last
            checkpoint even if the training has changed or has succeeded.
        unknown: It cannot be compared whether the training is the same. Its run is not ended, but its result and
            checkpoints are not used: they may be another training's.

    Example:
        >>> decide("failed", same_training=True, acknowledged=False)
        <Decision.RESUME: 'resume'>
    """
    if by_name and state in FINAL_STATES and (acknowledged or unknown or not same_training):
        return Decision.RESUME
    if not same_training:
        return Decision.FRESH
    if state not in FINAL_STATES:
        return Decision.RESUME if ending else Decision.ATTACH
    if unknown or (acknowledged and not same_generation):
        # This includes a later submission that died when only its status was written.
        return Decision.FRESH
    return Decision.DELIVER if state == "succeeded" else Decision.RESUME
