"""One try of a Dagster step: its facts for the core, the run of its training, and the meaning of the run's errors.

The core decides what to do with an existing run, and queries a `Step` for facts about Dagster: whether another try will
follow, whether a user has terminated the run, and whether Dagster has stored the result.
"""

import contextlib
import hashlib
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import dagster as dg

from dagster_rankzero import _compat
from dagster_rankzero.inputs import with_frames, without_annotations, without_dagster
from dagster_rankzero.io_manager import hold
from dagster_rankzero.metadata import build_result, describe_error, observe, single_output, takes_reference
from rankzero import InvalidJobError, Launcher, RankZeroError, RunHandle, WorkerFailedError, pipeline
from rankzero.errors import RunNotFoundError
from rankzero.pipeline import EngineOpened, Follower, LineWritten, MetricsReported, attempt, may_retry, store
from rankzero.pipeline import tries as try_rules

logger = logging.getLogger(__name__)

THINNING = 0.01
"""Least time to the next observation as a fraction of the time since the first, which limits their number."""

_RETRY = "its retry"

# Dagster runs that were interrupted in this process, in which Dagster continues with their other steps.
_interrupted: set[str] = set()


@dataclass(frozen=True)
class Step:
    """A try of a Dagster step: a `rankzero.pipeline.PipelineTry`."""

    dagster_run: str  # Id of the Dagster run
    root: str  # Id of the first run of the group of re-executions
    generation: str  # Id of the first run of the chain of automatic retries
    key: str
    number: int  # Tries of the step before this one, in this run
    executor: str  # One of `_compat.EXECUTORS`
    is_retried: bool  # True if the retry policy of the step allows another try in this run
    run_is_retried: bool  # True if Dagster would retry or resume the run if it failed now
    lease: float  # Seconds for which a training may continue without a follower
    instance: dg.DagsterInstance = field(repr=False)

    @classmethod
    def of(cls, context: Any) -> Self | None:
        """Returns the try that a context belongs to; None outside of a step, as in a test."""
        if (facts := _compat.facts_of(context)) is None:
            return None
        run, instance, key, number, policy, executor = facts
        root, generation = run.root_run_id or run.run_id, _generation(run, instance)
        is_retried = policy is not None and number < policy.max_retries
        again = _compat.may_be_retried(run, instance)
        return cls(
            run.run_id, root, generation, key, number, executor, is_retried, again, lease(policy), instance=instance
        )

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
        return None if self.is_followed_by_another else try_rules.LAST_LEASE()

    @property
    def retrier(self) -> int | None:
        """Returns the id of the process of the Dagster run if only that retries this step; else None."""
        if self.executor != _compat.MULTIPROCESS or self.run_is_retried:
            return None
        # The parent of a step's process is that process, or its fork server, which ends with it.
        return os.getppid()

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the output of the step that got the result is stored, also if a blocking check failed it."""
        return _compat.has_stored(self.instance, receiver["dagster_run"], receiver["step"])

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if Dagster automatically repeats a step that has succeeded, as a retry of its whole run does."""
        return bool(receiver.get("generation") == self.generation)

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the training should continue for another try that Dagster starts automatically."""
        if isinstance(error, (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)):
            return not self.is_terminating() and self._returns_after(_compat.signal_of(error))
        return isinstance(error, Exception) and self.is_followed_by_another

    def _returns_after(self, number: int | None) -> bool:
        """Returns True if another try follows automatically after a signal that ends this process."""
        # SIGINT reaches a whole run: from a terminal, or from the run's process to those of its steps. SIGTERM may be
        # sent to a step's process alone.
        if is_at_terminal():
            # A user at the terminal wants to stop the whole run.
            return False
        is_alone = self.executor == _compat.MULTIPROCESS and number == signal.SIGTERM
        return self.run_is_retried or (self.is_retried and (is_alone or self.executor == _compat.DELEGATED))

    def is_terminating(self) -> bool:
        """Returns True if the step's Dagster run is being terminated or has ended; False if Dagster does not answer."""
        try:
            return self.has_ended(self.dagster_run)
        except Exception:
            # The whole deployment may be shutting down: the training's lease ends it if no try follows.
            logger.warning("cannot query Dagster whether the run is being terminated", exc_info=True)
            return False

    def has_ended(self, dagster_run: str) -> bool:
        """Returns True if a Dagster run is being terminated, has ended, or was deleted. Raises what Dagster raises."""
        run = self.instance.get_run_by_id(dagster_run)
        # Dagster marks a run that takes too long as failed while it interrupts the steps.
        return run is None or run.is_finished or run.status is dg.DagsterRunStatus.CANCELING

    def is_run_retried(self) -> bool:
        """Returns True if the Dagster run has failed and Dagster starts it again by itself."""
        run = self.instance.get_run_by_id(self.dagster_run)
        return run is not None and _compat.is_retried(run, self.instance)


def train_in_step(resource: Any, context: Any, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trains for the step of a context, with observations of its assets, and returns its result for Dagster."""
    frames, kwargs = with_frames(resource._given_dataset, kwargs)
    resource = resource.options(dataset=frames) if frames else resource
    handle: RunHandle[Any] | None = None
    step, output = Step.of(context), single_output(context)
    shipped = without_annotations(train), without_dagster(args), without_dagster(kwargs)
    try:
        with open_run(resource._launcher(), step, context, *shipped, name=resource.name) as handle:
            for metrics in follow(handle, step, context.log, resource.observation_interval, resource.log_ranks):
                for event in observe(context, metrics):
                    attempt(context.log, "an observation", partial(context.log_event, event), None)
        is_reference = takes_reference(context, output) if resource.by_reference is None else resource.by_reference
        value = handle.result_ref() if is_reference else handle.result()
        if step is not None:
            offer(handle, step, context.log)
            resource._offered.append((handle, step))
    except RankZeroError as error:
        raise as_failure(error, handle, step, retry_user_errors=resource.retry_user_errors) from error
    return build_result(context, handle, value, output)


def run_id_of(root: str, key: str, name: str | None = None) -> str:
    """Returns the id of the run of a step's training, from the first Dagster run of the group of re-executions."""
    digest = hashlib.sha256("\0".join([root, key, name or ""]).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(filter(None, [key, name]))).strip("-")[:100]
    return f"{root[:8]}-{readable}-{digest}"


@contextlib.contextmanager
def open_run(
    launcher: Launcher, step: Step | None, context: Any, train: Any, args: Any, kwargs: Any, name: str | None = None
) -> Iterator[RunHandle[Any]]:
    """Opens the run of a step's training, which the block follows; see `rankzero.pipeline.open_run`.

    Outside of a step (None) the run ends with the block. A step that trains more than once names its trainings.
    """
    if step is None:
        run_id = run_id_of(f"test-{secrets.token_hex(8)}", _compat.name_of(context), name)
        with pipeline.open_run(launcher.options(run_id=run_id), train, args, kwargs) as handle:
            yield handle
        return
    if step.dagster_run in _interrupted or (step.number and step.is_terminating()):
        # A retry policy treats an interrupt as a failure, also if a user has caused it.
        raise dg.Failure("the run is being ended, so no training begins", allow_retries=False)
    if not _compat.claim_name(context, name or ""):
        raise InvalidJobError(
            f"this step has already trained {f'under the name {name!r}' if name else 'without a name'}: give its other "
            'training a name of its own, such as torch_distributor.options(name="second").run(...)'
        )
    orphan_timeout = step.lease if launcher.orphan_timeout is None else launcher.orphan_timeout
    run_id = run_id_of(step.root, step.key, name)
    launcher = launcher.options(run_id=run_id, labels=step.receiver, orphan_timeout=orphan_timeout)
    directory = store.normalize(store.join(store.root_of(launcher.store), run_id))
    with contextlib.suppress(RunNotFoundError):
        # Below, a directory of another user is refused.
        if not store.why_untrusted(directory):
            _check_owner(RunHandle.attach(directory, follows=False), step)
    try:
        with pipeline.open_run(launcher, train, args, kwargs, step, context.log) as handle:
            if handle.attached and not handle.status().final:
                # From here on the training belongs to this Dagster run: see `_leave_or_end`.
                offer(handle, step, context.log)
            hold([args, kwargs], handle.directory, context.log)
            yield handle
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as interrupt:
        if step.executor == _compat.IN_PROCESS and step.is_retried and not step.detaches(interrupt):
            # Otherwise the same process would immediately train again, since an interrupt counts as a failure.
            _interrupted.add(step.dagster_run)
            raise dg.Failure("the step was interrupted, and its training ended", allow_retries=False) from interrupt
        raise


def _check_owner(before: RunHandle[Any], step: Step) -> None:
    """Raises dagster.Failure if a living training belongs to a Dagster run of another chain of tries that is running.

    Two re-executions at the same time, or one and a retry of the first run, must not end each other's training. What
    Dagster raises if it cannot be queried fails this try: the next one queries it again.
    """
    owner = {**before.job.labels, **before.delivery().receiver}
    if owner["generation"] == step.generation or before.status().final or step.has_ended(owner["dagster_run"]):
        return
    raise dg.Failure(
        f"the training of this step belongs to the Dagster run {owner['dagster_run']}, which is running: terminate "
        "that one first, or wait for its end",
        allow_retries=False,
    )


def follow(
    handle: RunHandle[Any],
    step: Step | None,
    log: Any,
    interval: float | None,
    log_ranks: Collection[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Prints the output of the ranks until the run has ended; leaves or ends it once the Dagster run has ended.

    Yields the last value of each of rank 0's metrics, whenever they have changed, at least ``interval`` seconds apart,
    and more as the run grows old. None yields no metrics.
    """
    follower = Follower(handle, ranks=log_ranks)
    latest: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    started = next_at = time.monotonic()
    next_query = started + try_rules.QUERY_INTERVAL()
    while True:
        for event in follower.poll():
            if isinstance(event, LineWritten):
                event.show(handle.id)
            elif isinstance(event, EngineOpened):
                log.info("the Spark UI of the training, while it runs: %s", event.url)
            elif isinstance(event, MetricsReported):
                latest = event.values
        if follower.ended:
            return
        now = time.monotonic()
        if step is not None and now >= next_query:
            next_query = now + try_rules.QUERY_INTERVAL()
            if step.is_terminating():
                _leave_or_end(handle, step, log)
        if interval is not None and latest != shown and now >= next_at:
            shown, next_at = latest, now + max(interval, THINNING * (now - started))
            yield latest
        handle.pause()


def _leave_or_end(handle: RunHandle[Any], step: Step, log: Any) -> None:
    """Ends the training of a Dagster run that has ended, unless the training belongs to another run by now.

    Dagster does not interrupt the steps of a run that was deleted, or whose process it cannot reach. A training belongs
    to the Dagster run that has attached to it last, else to the one that has started it. If that run has failed and
    Dagster retries it, the training waits for the retry, for as long as its lease lasts.
    """

    def find_owner() -> str:
        owner = str(handle.delivery().receiver.get("dagster_run", step.dagster_run))
        return _RETRY if owner == step.dagster_run and step.is_run_retried() else owner

    # A store or an instance that cannot be queried now is queried again.
    owner = attempt(log, "the query which Dagster run the training belongs to", find_owner, None)
    if owner is None:
        return
    if owner == step.dagster_run:
        log.warning("the Dagster run has ended or was deleted, so its training ends")
        handle.cancel(reason="the Dagster run has ended or was deleted")
        return
    # Without another try, the driver ends with this process.
    while not (handle.attached or step.is_followed_by_another or handle.wait(try_rules.QUERY_INTERVAL())):
        if owner != _RETRY and attempt(log, "a query of Dagster", partial(step.has_ended, owner), False):
            break
    raise RankZeroError(f"the Dagster run has ended, and its training is left to {owner}")


def offer(handle: RunHandle[Any], step: Step, log: Any) -> None:
    """Records the step that follows the run and gets its value, before Dagster gets the value."""
    attempt(log, "the note of the delivery", lambda: handle.offer(step.receiver), None)


def acknowledge(handle: RunHandle[Any], step: Step, log: Any) -> None:
    """Records that Dagster has stored the result of a step that has ended, if it has."""

    def note() -> None:
        if step.has_accepted(step.receiver):
            handle.acknowledge()

    attempt(log, "the acknowledgement of the result", note, None)


def as_failure(
    error: RankZeroError, handle: RunHandle[Any] | None, step: Step | None = None, *, retry_user_errors: bool
) -> dg.Failure:
    """Returns the `dagster.Failure` for an error of a run: its cause, the run directory, and the retry decision."""
    has_checkpoint = handle is not None and handle.status().checkpoint is not None
    entries = describe_error(error)
    if handle is not None:
        entries["run_directory"] = dg.MetadataValue.path(handle.directory)
    can_help = may_retry(error, has_checkpoint=has_checkpoint, retry_user_errors=retry_user_errors)
    return dg.Failure(
        description=str(error) if isinstance(error, WorkerFailedError) else f"{type(error).__name__}: {error}",
        metadata=entries,
        # After the last try "Exceeded max_retries" would hide the error.
        allow_retries=can_help and (step is None or step.is_retried),
    )


def lease(policy: dg.RetryPolicy | None) -> float:
    """Returns the seconds for which a training waits for the next try: the policy's longest delay, and a margin."""
    if policy is None or not policy.delay:
        return try_rules.lease(0.0)
    tries = policy.max_retries
    exponential = try_rules.power(2.0, tries) - 1
    growth = {dg.Backoff.EXPONENTIAL: exponential, dg.Backoff.LINEAR: tries, None: 1.0}[policy.backoff]
    growth *= 2 if policy.jitter is dg.Jitter.PLUS_MINUS else 1
    return try_rules.lease(try_rules.longest_delay(policy.delay, growth))


def is_at_terminal() -> bool:
    """Returns True if this process is in the foreground of a terminal, where Ctrl-C reaches it."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _generation(run: dg.DagsterRun, instance: dg.DagsterInstance) -> str:
    while _compat.is_automatic_retry(run) and (parent := instance.get_run_by_id(str(run.parent_run_id))):
        run = parent
    return run.run_id
