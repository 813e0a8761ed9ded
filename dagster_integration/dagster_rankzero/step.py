"""`Step`: one try of a step, and what it shares with the tries before and after it.

A training belongs to its run directory. A try that dies leaves it running if another will come, and that one takes
it up; a try that a user ends, and the last one, take it along.
"""

import hashlib
import logging
import re
from dataclasses import dataclass, field
from typing import Any, Self

import dagster as dg

from dagster_rankzero import _compat

logger = logging.getLogger(__name__)

SCHEDULING_SLACK = 900.0
"""Seconds between the moment at which a try is due and its first look at the run: a pool may be full, a run may wait
in the queue, a deployment may take its time."""

LONGEST_DELAY = 24 * 3600.0
"""Seconds; bound of a retry's delay that grows."""

_STEM_LIMIT = 100


@dataclass(frozen=True)
class Step:
    """One try of a step.

    Attributes:
        dagster_run: Id of its run.
        root: Id of the first of the runs that re-execute each other.
        generation: Id of the first of the runs that Dagster has started by itself after each other's failure.
        key: The step's key.
        number: Tries of the step before this one, in this run.
        call: How many trainings this try has begun before.
        from_failure: True if a user has re-executed from the failure.
        another_follows: True if Dagster will come back by itself, should this try die.
        lease: Seconds for which a training may go on without a follower.
    """

    dagster_run: str
    root: str
    generation: str
    key: str
    number: int
    call: int
    from_failure: bool
    another_follows: bool
    lease: float
    instance: dg.DagsterInstance = field(repr=False)

    @classmethod
    def begin(cls, context: Any) -> Self | None:
        """The try that a context belongs to, with one more training; None outside of any step, as in a test."""
        facts = _compat.begin_call(context)
        if facts is None:
            return None
        run, instance = facts.run, facts.instance
        return cls(
            dagster_run=run.run_id,
            root=run.root_run_id or run.run_id,
            generation=_generation(run, instance),
            key=facts.key,
            number=facts.number,
            call=facts.call,
            from_failure=_compat.is_from_failure(run, instance),
            another_follows=tries_left(facts.policy, facts.number) or _compat.may_be_retried(run, instance),
            lease=lease(facts.policy),
            instance=instance,
        )

    def run_id(self, root: str) -> str:
        """A name for the run of this training, the same in every try of the step."""
        return run_id_of(root, self.key, self.call)

    def was_ended_by_a_user(self) -> bool:
        """True if Dagster has been told to end the run: by a user, or by its own bound of a run's time.

        Else a process that is interrupted goes away with its host, and the run counts as started until that is over.
        """
        try:
            run = self.instance.get_run_by_id(self.dagster_run)
        except Exception:
            # A whole deployment goes down: the training's lease ends it if nobody comes back.
            logger.warning("cannot ask Dagster whether the run is being terminated", exc_info=True)
            return False
        # A run that takes too long is marked as failed while its steps are being interrupted.
        return run is None or run.is_finished or run.status is dg.DagsterRunStatus.CANCELING

    def is_alone(self) -> bool:
        """False if another of the runs that re-execute each other still goes on, and may follow the same training."""
        return _compat.is_alone(self.dagster_run, self.instance)


def run_id_of(root: str, key: str, call: int) -> str:
    """A name for a training of a step, the same in all tries and re-executions.

    Args:
        root: Id of the first of the Dagster runs that re-execute each other.
        key: The step's key.
        call: Which of the trainings of the step, from 0.

    Returns:
        ``run-step[-call]-`` and a checksum of the three.

    Example:
        >>> run_id_of("8f14e45f-ceea-467f-a2d0-1f3c5a7b9d0e", "train[3]", 0)
        '8f14e45f-train-3-71b02c8d86f0e6e2'
    """
    digest = hashlib.sha256("\0".join([root, key, str(call)]).encode()).hexdigest()[:16]
    return f"{stem_of(root, key)}{f'-{call}' if call else ''}-{digest}"


def stem_of(run: str, key: str) -> str:
    """The part of a run's name that tells a person which Dagster run and step it was."""
    named = re.sub(r"[^A-Za-z0-9_-]+", "-", key).strip("-")[:_STEM_LIMIT]
    return f"{run[:8]}-{named}"


def goes_on(state: str, *, same_training: bool, same_generation: bool, from_failure: bool, handed: bool) -> bool:
    """True if a try takes up what an earlier one has left, be it alive, failed, or a result; False: from scratch.

    Tries that follow each other by themselves (of one generation) go on with each other's training, and so does a
    re-execution by a user, except after a success: a result that was handed on is not handed to a re-execution that
    trains again. "From failure" means that it did not get to where it was to be.

    Args:
        state: Of the run.
        same_training: It had the same function and arguments.
        same_generation: It was started by a try that this one follows by itself.
        from_failure: A user has re-executed from the failure.
        handed: Somebody got its result.
    """
    if not same_training:
        return False
    return state != "succeeded" or same_generation or from_failure or not handed


def tries_left(policy: dg.RetryPolicy | None, number: int) -> bool:
    """True if the policy allows another try after one with so many before it."""
    return policy is not None and number < policy.max_retries


def lease(policy: dg.RetryPolicy | None) -> float:
    """Seconds for which a training waits for the next try: the longest delay of the policy, and some slack."""
    if policy is None or not policy.delay:
        return SCHEDULING_SLACK
    longest = float(policy.delay)
    try:
        if policy.backoff is dg.Backoff.EXPONENTIAL:
            longest *= 2.0**policy.max_retries - 1
        elif policy.backoff is dg.Backoff.LINEAR:
            longest *= policy.max_retries
    except OverflowError:
        longest = LONGEST_DELAY
    if policy.jitter is dg.Jitter.PLUS_MINUS:
        longest *= 2
    return max(float(policy.delay), min(longest, LONGEST_DELAY)) + SCHEDULING_SLACK


def _generation(run: dg.DagsterRun, instance: dg.DagsterInstance) -> str:
    while _compat.is_automatic_retry(run) and (parent := instance.get_run_by_id(str(run.parent_run_id))):
        run = parent
    return run.run_id
