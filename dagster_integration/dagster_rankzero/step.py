"""`Step`: one try of a Dagster step, with the facts that the run of its training needs.

`rankzero.submit.durable` decides what to do with an existing run. It queries a `Step` for facts about Dagster: whether
another try will follow, whether a user has terminated the run, and whether Dagster has stored the result.
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
    """A try of a Dagster step.

    Attributes:
        dagster_run: Id of the Dagster run.
        root: Id of the first run of the group of re-executions.
        generation: Id of the first run of the chain of automatic retries.
        key: The step's key.
        number: Tries of the step before this one, in this run.
        executor: Kind of process that runs the step: one of `_compat.EXECUTORS`.
        is_retried: True if the retry policy of the step allows another try in this run.
        run_is_retried: True if Dagster would retry or resume the run if it failed now.
        lease: Seconds for which a training may continue without a follower.
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
        """Returns the try that a context belongs to; None outside of a step, as in a test."""
        facts = _compat.facts_of(context)
        if facts is None:
            return None
        run, instance, key, number, policy, executor = facts
        return cls(
            dagster_run=run.run_id,
            root=run.root_run_id or run.run_id,
            generation=_generation(run, instance),
            key=key,
            number=number,
            executor=executor,
            is_retried=policy is not None and number < policy.max_retries,
            run_is_retried=_compat.may_be_retried(run, instance),
            lease=lease(policy),
            instance=instance,
        )

    # -- queries of the core -------------------------------------------------------------------

    @property
    def receiver(self) -> dict[str, str]:
        """Returns the identity of this step, by which a later try finds out whether Dagster has its result."""
        return {"dagster_run": self.dagster_run, "generation": self.generation, "step": self.key}

    @property
    def is_followed_by_another(self) -> bool:
        """Returns True if Dagster would start another try automatically if this process died."""
        # If the run has a single process, its death ends the retries of all steps.
        return self.run_is_retried or (self.is_retried and self.executor != _compat.IN_PROCESS)

    @property
    def lease_when_attached(self) -> float | None:
        """Returns the seconds for which a run to which the last try has attached outlives it; None for other tries."""
        return None if self.is_followed_by_another else leases.LAST_LEASE

    @property
    def retrier(self) -> Mapping[str, Any] | None:
        """Returns the process of the Dagster run if only that retries this step; else None."""
        if self.executor != _compat.MULTIPROCESS or self.run_is_retried:
            return None
        # The parent of a step's process is that process, or its fork server, which ends with it.
        return describe_process(os.getppid())

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the step that got the result has succeeded, or was failed by one of its blocking checks.

        In both cases its output is stored. A result that a check has rejected would be rejected again.
        """
        asked = self.instance, receiver["dagster_run"], receiver["step"]
        return _compat.step_succeeded(*asked) or _compat.step_was_rejected(*asked)

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if Dagster automatically repeats a step that has succeeded, as a retry of its whole run does."""
        return bool(receiver.get("generation") == self.generation)

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the training should continue for another try that Dagster starts automatically."""
        if isinstance(error, (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)):
            return not self.is_terminating() and self._returns_after(_compat.signal_of(error))
        return isinstance(error, Exception) and self.is_followed_by_another

    def _returns_after(self, number: int | None) -> bool:
        """Returns True if another try follows automatically after a signal that ends this process.

        SIGINT reaches a whole run: from a terminal, or from the run's process to those of its steps. SIGTERM may be
        sent to a step's process alone.
        """
        if is_at_terminal():
            # A user at the terminal wants to stop the whole run.
            return False
        if self.run_is_retried:
            return True
        alone = self.executor == _compat.DELEGATED or (
            self.executor == _compat.MULTIPROCESS and number == signal.SIGTERM
        )
        return self.is_retried and alone

    # -- the run's name ------------------------------------------------------------------------

    def run_id(self, root: str, call: int) -> str:
        """Returns a name for the run of a training, the same in every try of the step."""
        return run_id_of(root, self.key, call)

    def is_terminating(self, dagster_run: str = "") -> bool:
        """Returns True if a Dagster run is being terminated or has ended: by a user, or by Dagster's limit of its time.

        Args:
            dagster_run: Id of the Dagster run; left out, the step's own.
        """
        try:
            run = self.instance.get_run_by_id(dagster_run or self.dagster_run)
        except Exception:
            # The whole deployment may be shutting down: the training's lease ends it if no try follows.
            logger.warning("cannot query Dagster whether the run is being terminated", exc_info=True)
            return False
        # Dagster marks a run that takes too long as failed while it interrupts the steps.
        return run is None or run.is_finished or run.status is dg.DagsterRunStatus.CANCELING

    def is_run_retried(self) -> bool:
        """Returns True if the Dagster run has failed and Dagster starts it again by itself."""
        run = self.instance.get_run_by_id(self.dagster_run)
        return run is not None and _compat.is_retried(run, self.instance)

    def is_alone(self) -> bool:
        """Returns False if another run of the group of re-executions is running, and may follow the same training."""
        return _compat.is_alone(self.dagster_run, self.instance)


def run_id_of(root: str, key: str, call: int) -> str:
    """Returns a name for a training of a step, the same in all tries and re-executions.

    Args:
        root: Id of the first Dagster run of the group of re-executions.
        key: The step's key.
        call: Number of the training in the step, from 0.

    Returns:
        ``run-step[-call]-`` and a checksum of the three.

    Example:
        >>> run_id_of("8f14e45f-ceea-467f-a2d0-1f3c5a7b9d0e", "train[3]", 0)
        '8f14e45f-train-3-71b02c8d86f0e6e2'
    """
    digest = hashlib.sha256("\0".join([root, key, str(call)]).encode()).hexdigest()[:16]
    return f"{stem_of(root, key)}{f'-{call}' if call else ''}-{digest}"


def stem_of(run: str, key: str) -> str:
    """Returns the readable part of a run's name, from the Dagster run and the step."""
    named = re.sub(r"[^A-Za-z0-9_-]+", "-", key).strip("-")[:_STEM_LIMIT]
    return f"{run[:8]}-{named}"


def lease(policy: dg.RetryPolicy | None) -> float:
    """Returns the seconds for which a training waits for the next try: the policy's longest delay, and a margin."""
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
    """Returns True if this process is in the foreground of a terminal, where Ctrl-C reaches it."""
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
