"""The run of a step's training: which one it is, and following it."""

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import dagster as dg

from dagster_rankzero import _compat
from dagster_rankzero.metadata.observation import next_interval
from dagster_rankzero.step import Step, stem_of
from rankzero import Launcher, RunHandle
from rankzero.pipeline import Follower, Identity, LineWritten, MetricsReported, Opened, attempt

# Dagster runs that were interrupted in this process: Dagster goes on with their other steps.
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
    """The run of a step's training, to be followed in the block; see `rankzero.submit.durable.open_durable`.

    Args:
        launcher: How it is run; has no ``run_id`` yet.
        step: The try; None outside of any step.
        context: Of the asset or op.
        train: What is run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        dagster.Failure: the Dagster run is being terminated.
        rankzero.RankZeroError: the job cannot be run as described, or an earlier run does not end.
    """
    if step is None:
        run_id = f"{stem_of('test', _compat.name_of(context))}-{secrets.token_hex(4)}"
        with launcher.options(run_id=run_id).owned(train, args, kwargs) as handle:
            yield Opened(handle)
        return
    if step.dagster_run in _interrupted or (step.number and step.is_terminating()):
        # An interrupt counts as a failure for a retry policy, also one that a user has asked for.
        raise dg.Failure("the run is being ended, so no training begins", allow_retries=False)
    identity = launcher.identity(train, args, kwargs)
    launcher = _named(launcher, step, train, _compat.calls_of(context), identity)
    try:
        with launcher.durable(train, args, kwargs, step, context.log, identity) as opened:
            yield opened
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as interrupt:
        if step.executor == _compat.IN_PROCESS and step.is_retried and not step.detaches(interrupt):
            # Else the same process would train again at once: an interrupt counts as a failure there.
            _interrupted.add(step.dagster_run)
            raise dg.Failure("the step was interrupted, and its training ended", allow_retries=False) from interrupt
        raise


def _named(launcher: Launcher, step: Step, train: Any, calls: _compat.Calls, identity: Identity) -> Launcher:
    """Returns the launcher with a name for the run, by which every try of the step finds it."""
    program = str(getattr(train, "__qualname__", train))
    labels = {"dagster_run": step.dagster_run, "generation": step.generation, "step": step.key, "train": program}
    orphan_timeout = step.lease if launcher.orphan_timeout is None else launcher.orphan_timeout
    launcher = launcher.options(labels=labels, orphan_timeout=orphan_timeout)

    def of_call(call: int) -> Launcher:
        return launcher.options(run_id=step.run_id(_root_of(launcher, step, call), call))

    def is_same(call: int) -> bool | None:
        before = of_call(call).find()
        return before.compare(identity, step.generation).same if before else None

    def is_replaced(call: int) -> bool:
        # A retry repeats the same calls, perhaps in another order: what it did not find by now, another call may come
        # for. A user who runs the step again has changed the arguments or the code.
        labels = before.labels if (before := of_call(call).find()) else {}
        return labels.get("generation", step.generation) != step.generation and labels.get("train") == program

    return of_call(calls.claim(is_same, is_replaced))


def _root_of(launcher: Launcher, step: Step, call: int) -> str:
    """The Dagster run after which the run is named: the first of those that re-execute each other, if it may be."""
    apart = step.dagster_run if step.generation == step.root else step.generation
    if apart == step.root:
        return step.root
    own, shared = (launcher.options(run_id=step.run_id(root, call)).find() for root in (apart, step.root))
    # Two re-executions of one run at the same time: the second must not end the training of the first.
    return apart if own or (shared and not shared.status().final and not step.is_alone()) else step.root


def follow(
    opened: Opened,
    on_line: Callable[[str], None],
    interval: float | None,
    log_ranks: Collection[int] | None = None,
    *,
    whole: bool = False,
) -> Iterator[dict[str, Any]]:
    """Shows what the ranks write until the run has ended.

    Args:
        opened: The run.
        on_line: Gets every line, with its ``[rank]`` prefix.
        interval: Least seconds between two observations of the metrics, which grow with the run's age. None for none.
        log_ranks: Whose lines are shown; None for all. A rank whose failure ends the run is shown as well.
        whole: Show every line, and again all that an earlier try has shown, however much it is.

    Yields:
        Rank 0's metrics, the last value of each, whenever they have changed.
    """
    follower = Follower(opened.handle, ranks=log_ranks, attached=opened.attached, whole=whole)
    latest: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    started = next_at = time.monotonic()
    while True:
        for event in follower.poll():
            if isinstance(event, LineWritten):
                on_line(event.text)
            elif isinstance(event, MetricsReported):
                latest = event.values
        if follower.ended:
            return
        now = time.monotonic()
        if interval is not None and latest != shown and now >= next_at:
            shown, next_at = latest, now + next_interval(interval, now - started)
            yield latest
        opened.handle.pause()


def offer(handle: RunHandle[Any], step: Step | None, log: Any) -> None:
    """Notes to whom the value goes, before it goes to Dagster. Without the note, the next try gets the value again."""
    if step is not None:
        attempt(log, "the note of the delivery", lambda: handle.offer(step.receiver), None)
