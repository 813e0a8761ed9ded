"""Opens and follows the run of a step's training."""

import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import dagster as dg

from dagster_rankzero import _compat
from dagster_rankzero.io_manager.manifest import hold
from dagster_rankzero.metadata import next_interval
from dagster_rankzero.step import Step, stem_of
from rankzero import Launcher, RankZeroError, ResultRef, RunHandle
from rankzero.pipeline import EngineOpened, Follower, LineWritten, MetricsReported, Opened, attempt, map_refs

_RETRY = "its retry"

QUERY_INTERVAL = 60.0
"""Seconds between two queries of the state of the Dagster run."""

# Dagster runs that were interrupted in this process, in which Dagster continues with their other steps.
_interrupted: set[str] = set()


@contextlib.contextmanager
def open_run(
    launcher: Launcher,
    step: Step | None,
    context: Any,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[Opened]:
    """Opens the run of a step's training, which the block follows; see `rankzero.submit.durable.open_durable`.

    Args:
        launcher: Options of the run, without a ``run_id``.
        step: The try of the step; None outside of a step.
        context: Context of the asset or op.
        train: The function or script.
        args: Positional arguments of the training.
        kwargs: Keyword arguments of the training.

    Raises:
        dagster.Failure: the Dagster run is being terminated.
        rankzero.RankZeroError: the job cannot run as described, or an earlier run does not end.
    """
    if step is None:
        run_id = f"{stem_of('test', _compat.name_of(context))}-{secrets.token_hex(4)}"
        with launcher.options(run_id=run_id).owned(train, args, kwargs) as handle:
            yield Opened(handle)
        return
    if step.dagster_run in _interrupted or (step.number and step.is_terminating()):
        # A retry policy treats an interrupt as a failure, also if a user has caused it.
        raise dg.Failure("the run is being ended, so no training begins", allow_retries=False)
    launcher = _named(launcher, step, context, train, args, kwargs)
    try:
        with launcher.durable(train, args, kwargs, step, context.log) as opened:
            if opened.attached and not opened.handle.status().final:
                # From here on the training belongs to this Dagster run: see `_leave_or_end`.
                offer(opened.handle, step, context.log)
            _hold_inputs(opened.handle.directory, args, kwargs, context.log)
            yield opened
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as interrupt:
        if step.executor == _compat.IN_PROCESS and step.is_retried and not step.detaches(interrupt):
            # Otherwise the same process would immediately train again, since an interrupt counts as a failure.
            _interrupted.add(step.dagster_run)
            raise dg.Failure("the step was interrupted, and its training ended", allow_retries=False) from interrupt
        raise


def _named(
    launcher: Launcher, step: Step, context: Any, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launcher:
    """Returns the launcher with a run id by which every try of the step finds the run."""
    program = str(getattr(train, "__qualname__", train))
    labels = {"dagster_run": step.dagster_run, "generation": step.generation, "step": step.key, "train": program}
    orphan_timeout = step.lease if launcher.orphan_timeout is None else launcher.orphan_timeout
    launcher = launcher.options(labels=labels, orphan_timeout=orphan_timeout)

    differing: dict[str, str] = {}

    def of_call(call: int) -> Launcher:
        return launcher.options(run_id=step.run_id(_root_of(launcher, step, call), call))

    def relation_of(call: int) -> str | None:
        if (before := of_call(call).find()) is None:
            return None
        identity = launcher.identity(train, args, kwargs, before, step.generation)
        comparison = before.compare(identity, step.generation)
        if comparison.same:
            return _compat.SAME
        differing[before.id] = ", ".join(comparison.differing)
        if before.labels.get("train") != program:
            return _compat.OTHER
        if before.labels.get("generation", step.generation) != step.generation:
            # A user who runs the step again has changed the arguments or the code.
            return _compat.REPLACED
        # A retry repeats the same calls, perhaps with random arguments. A run that has ended may be a later call's.
        return _compat.OTHER if before.status().final else _compat.CONTINUED

    if (claimed := _compat.calls_of(context).claim(relation_of)) is None:
        raise RankZeroError("another call of this try has attached to this training: the next try finds each one's own")
    named = of_call(claimed)
    if differing and named.find() is None:
        others = "; ".join(f"{run_id} ({what})" for run_id, what in differing.items())
        context.log.info("the training begins from scratch: the step's earlier runs are of other trainings: %s", others)
    return named


def _root_of(launcher: Launcher, step: Step, call: int) -> str:
    """Returns the Dagster run that names the run: the first re-execution's, unless that would end its training."""
    apart = step.dagster_run if step.generation == step.root else step.generation
    if apart == step.root:
        return step.root
    own, shared = (launcher.options(run_id=step.run_id(root, call)).find() for root in (apart, step.root))
    # If two re-executions of one run are running, the second must not end the training of the first.
    return apart if own or (shared and not shared.status().final and not step.is_alone()) else step.root


def _hold_inputs(run_directory: str, args: tuple[Any, ...], kwargs: dict[str, Any], log: Any) -> None:
    """Keeps the stored versions that a training reads, since a restarted attempt opens them again."""
    refs: list[ResultRef] = []
    map_refs([args, kwargs], refs.append)
    for ref in refs:
        attempt(log, f"the mark that {ref.uri} is read", functools.partial(hold, ref.uri, run_directory), None)


def follow(
    opened: Opened,
    step: Step | None,
    log: Any,
    on_line: Callable[[str], None],
    interval: float | None,
    log_ranks: Collection[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Shows the output of the ranks until the run has ended; leaves or ends it once the Dagster run has ended.

    Args:
        opened: The run.
        step: The try of the step; None outside of a step.
        log: The logger of the step, which gets the address of the Spark UI.
        on_line: Receives every line, with its ``[rank]`` prefix.
        interval: Least seconds between two yields of metrics, which grow with the run's age. None yields no metrics.
        log_ranks: Ranks whose lines are shown; None for all. A rank whose failure ends the run is shown as well.

    Yields:
        The last value of each of rank 0's metrics, whenever they have changed.

    Raises:
        rankzero.RankZeroError: the Dagster run has ended, and the training continues for another one.
    """
    follower = Follower(opened.handle, ranks=log_ranks, attached=opened.attached)
    latest: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    started = next_at = time.monotonic()
    next_query = started + QUERY_INTERVAL
    while True:
        for event in follower.poll():
            if isinstance(event, LineWritten):
                on_line(event.text)
            elif isinstance(event, EngineOpened):
                log.info("the Spark UI of the training, while it runs: %s", event.url)
            elif isinstance(event, MetricsReported):
                latest = event.values
        if follower.ended:
            return
        now = time.monotonic()
        if step is not None and now >= next_query:
            next_query = now + QUERY_INTERVAL
            if step.is_terminating():
                _leave_or_end(opened, step, log)
        if interval is not None and latest != shown and now >= next_at:
            shown, next_at = latest, now + next_interval(interval, now - started)
            yield latest
        opened.handle.pause()


def _leave_or_end(opened: Opened, step: Step, log: Any) -> None:
    """Ends the training of a Dagster run that has ended, unless the training belongs to another run by now.

    Dagster does not interrupt the steps of a run that was deleted, or whose process it cannot reach. A training belongs
    to the Dagster run that has attached to it last, else to the one that has started it. If that run has failed and
    Dagster retries it, the training waits for the retry, for as long as its lease lasts.

    Raises:
        rankzero.RankZeroError: the training continues for another Dagster run.
    """
    handle = opened.handle

    def find_owner() -> str:
        owner = handle.delivery().receiver.get("dagster_run", step.dagster_run)
        return _RETRY if owner == step.dagster_run and step.is_run_retried() else str(owner)

    # A store or an instance that cannot be queried now is queried again.
    owner = attempt(log, "the query which Dagster run the training belongs to", find_owner, None)
    if owner is None:
        return
    if owner == step.dagster_run:
        log.warning("the Dagster run has ended or was deleted, so its training ends")
        handle.cancel(reason="the Dagster run has ended or was deleted")
        return
    # Without another try, the driver ends with this process.
    while not (opened.attached or step.is_followed_by_another or handle.wait(QUERY_INTERVAL)):
        if owner != _RETRY and step.is_terminating(owner):
            break
    raise RankZeroError(f"the Dagster run has ended, and its training is left to {owner}")


def offer(handle: RunHandle[Any], step: Step, log: Any) -> None:
    """Records the step that follows the run and gets its value, before Dagster gets the value.

    Without the record the next try gets the value again, and an earlier try may end the run with its Dagster run.
    """
    attempt(log, "the note of the delivery", lambda: handle.offer(step.receiver), None)


def acknowledge(handle: RunHandle[Any], step: Step, log: Any) -> None:
    """Records that Dagster has stored the result of a step that has ended, if it has."""

    def note() -> None:
        if step.has_accepted(step.receiver):
            handle.acknowledge()

    attempt(log, "the acknowledgement of the result", note, None)
