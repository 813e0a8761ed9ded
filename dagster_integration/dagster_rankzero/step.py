"""`Step`: one try of a step, and what it knows of Dagster for the run of its training.

What an existing run means is core's to decide (`rankzero.submit.durable`); a step answers its questions: will another
try come, was this a user's doing, does Dagster have the result.
"""

import hashlib
import logging
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import dagster as dg

from dagster_rankzero import _compat
from rankzero.pipeline import describe_process
from rankzero.pipeline import lease as leases

logger = logging.getLogger(__name__)

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
        executor: What runs the step: one of `_compat.EXECUTORS`.
        is_retried: True if the retry policy of the step allows another try in this run.
        run_is_retried: True if Dagster would start the run again, or resume it, should it fail now.
        lease: Seconds for which a training may go on without a follower.
    """

    dagster_run: str
    root: str
    generation: str
    key: str
    number: int
    executor: str
    is_retried: bool
    run_is_retried: bool
    lease: float
    instance: dg.DagsterInstance = field(repr=False)

    @classmethod
    def of(cls, context: Any) -> Self | None:
        """The try that a context belongs to; None outside of any step, as in a test."""
        facts = _compat.facts_of(context)
        if facts is None:
            return None
        run, instance = facts.run, facts.instance
        return cls(
            dagster_run=run.run_id,
            root=run.root_run_id or run.run_id,
            generation=_generation(run, instance),
            key=facts.key,
            number=facts.number,
            executor=facts.executor,
            is_retried=facts.policy is not None and facts.number < facts.policy.max_retries,
            run_is_retried=_compat.may_be_retried(run, instance),
            lease=lease(facts.policy),
            instance=instance,
        )

    # -- what core asks ------------------------------------------------------------------------

    @property
    def receiver(self) -> dict[str, str]:
        """Names this step to whoever asks later whether Dagster has its result."""
        return {"dagster_run": self.dagster_run, "generation": self.generation, "step": self.key}

    @property
    def is_followed_by_another(self) -> bool:
        """True if Dagster would come back by itself, should this process die."""
        # With the only process of a run go the retries of its steps.
        return self.run_is_retried or (self.is_retried and self.executor != _compat.IN_PROCESS)

    @property
    def lease_when_attached(self) -> float | None:
        """Seconds for which a run that the last try has attached to outlives it."""
        return None if self.is_followed_by_another else leases.LAST_LEASE

    @property
    def retrier(self) -> Mapping[str, Any] | None:
        """The process of the Dagster run, which retries its steps, unless something else brings the run back."""
        if self.executor != _compat.MULTIPROCESS or self.run_is_retried:
            return None
        # The parent of a step's process, or its fork server, which ends with it.
        return describe_process(os.getppid())

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """True if the step to which the result went has succeeded, or was failed by a blocking check of its own.

        Its output is stored then. What a check has rejected would be rejected again.
        """
        asked = self.instance, receiver["dagster_run"], receiver["step"]
        return _compat.step_succeeded(*asked) or _compat.step_was_rejected(*asked)

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """True if Dagster runs a step again by itself that has succeeded, as a retry of its whole run does."""
        return bool(receiver.get("generation") == self.generation)

    def detaches(self, error: BaseException) -> bool:
        """True if the training goes on, for a try that Dagster starts by itself."""
        if isinstance(error, (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)):
            return not self.is_terminating() and self._returns_after(_compat.signal_of(error))
        return isinstance(error, Exception) and self.is_followed_by_another

    def _returns_after(self, number: int | None) -> bool:
        """True if another try comes by itself after a signal that ends this process.

        SIGINT goes to a whole run: from a terminal, or from the run's process to those of its steps. SIGTERM may go
        to a step's process alone.
        """
        if is_at_terminal():
            # Whoever sits there wants the end of it all.
            return False
        if self.run_is_retried:
            return True
        alone = self.executor == _compat.DELEGATED or (
            self.executor == _compat.MULTIPROCESS and number == signal.SIGTERM
        )
        return self.is_retried and alone

    # -- the run's name ------------------------------------------------------------------------

    def run_id(self, root: str, call: int) -> str:
        """A name for the run of a training, the same in every try of the step."""
        return run_id_of(root, self.key, call)

    def is_terminating(self) -> bool:
        """True if Dagster has been asked to end the run: by a user, or by its own bound of a run's time."""
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


def lease(policy: dg.RetryPolicy | None) -> float:
    """Seconds for which a training waits for the next try: the longest delay of the policy, and some slack."""
    if policy is None or not policy.delay:
        return leases.lease(0.0)
    growth = 1.0
    if policy.backoff is dg.Backoff.EXPONENTIAL:
        growth = leases.power(2.0, policy.max_retries) - 1
    elif policy.backoff is dg.Backoff.LINEAR:
        growth = policy.max_retries
    if policy.jitter is dg.Jitter.PLUS_MINUS:
        growth *= 2
    return leases.lease(leases.longest_delay(policy.delay, growth))


def is_at_terminal() -> bool:
    """True if this process belongs to what a person runs in the foreground of a terminal, where Ctrl-C reaches it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _generation(run: dg.DagsterRun, instance: dg.DagsterInstance) -> str:
    while _compat.is_automatic_retry(run) and (parent := instance.get_run_by_id(str(run.parent_run_id))):
        run = parent
    return run.run_id
