"""A step's training as one of its tries sees it: started or taken up, followed, left to the next try, or ended."""

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg

from dagster_rankzero.step import Step, goes_on, stem_of
from rankzero import Launcher, RankZeroError, RunHandle
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.run import delivery as handover
from rankzero.run.growing import Position
from rankzero.run.handle import FOLLOW_INTERVAL, FOLLOW_INTERVAL_REMOTE
from rankzero.store import is_url
from rankzero.submit.identity import digest_of

LAST_LEASE = 60.0
"""Seconds for which a training that the last try took up outlives that. Longer than a store is away for a moment."""

Opened = tuple[RunHandle[Any], dict[int, Position]]
"""A run, and where each rank's lines begin that are to be shown."""


@contextlib.contextmanager
def open_run(
    launcher: Launcher,
    step: Step | None,
    name: str,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    log: logging.Logger,
) -> Iterator[Opened]:
    """The run of a step's training: a new one, or the one that an earlier try has left.

    The block follows it. If another try of the step will come, the training outlives this process, and ends with the
    block only if that is interrupted for good; else it ends with the block and with this process, however they end.

    Args:
        launcher: How it is run; has no ``run_id`` yet.
        step: The try; None outside of any step.
        name: Of the step, for people.
        train: What is run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        log: The step's log.

    Raises:
        dagster.Failure: the Dagster run is being terminated.
        rankzero.RankZeroError: the job cannot be run as described, or an earlier run does not end.
    """
    if step is None:
        run_id = f"{stem_of('test', name)}-{secrets.token_hex(4)}"
        with launcher.options(run_id=run_id).owned(train, args, kwargs) as opened:
            yield opened
        return
    if step.number and step.was_ended_by_a_user():
        # An interrupt counts as a failure for a retry policy, also one that a user has asked for.
        raise dg.Failure("the run is being terminated, so the training does not begin again", allow_retries=False)
    launcher = _named(launcher, step, digest_of(_facts_of(train), args, kwargs))
    before = launcher.find()
    if before:
        _settle(before, step, launcher, log)
        # Nothing of the job needs to be read again.
        if waiting := launcher.take_up():
            log.info("took up the training in %s", waiting.directory)
            with _shared(launcher, step, log):
                if not (step.another_follows or waiting.status().final):
                    waiting.hold(LAST_LEASE)
                yield waiting, _positions(waiting, {})
            return
    if not step.another_follows:
        with launcher.owned(train, args, kwargs) as opened:
            log.info("started the training in %s; it ends with this process", opened[0].directory)
            yield opened
        return
    since = before.ends() if before else {}
    with _shared(launcher, step, log):
        handle = launcher.submit(train, *args, **kwargs)
        log.info("started the training in %s; a later try takes it up if this process dies", handle.directory)
        yield handle, _positions(handle, since)


def _positions(handle: RunHandle[Any], since: dict[int, Position]) -> dict[int, Position]:
    return {rank: since.get(rank, Position()) for rank in handle.ends()}


def _named(launcher: Launcher, step: Step, training: str) -> Launcher:
    """The launcher with a name for the run, by which every try of the step finds it."""
    labels = {"dagster_run": step.dagster_run, "generation": step.generation, "step": step.key, "training": training}
    launcher = launcher.options(
        labels=labels, orphan_timeout=step.lease if launcher.orphan_timeout is None else launcher.orphan_timeout
    )
    apart = step.dagster_run if step.generation == step.root else step.generation
    own, shared = (launcher.options(run_id=step.run_id(root)) for root in (apart, step.root))
    if apart == step.root:
        return shared
    other = shared.find()
    # Two re-executions of one run at the same time: the second must not end the training of the first.
    if own.find() or (other and not other.status().final and not step.is_alone()):
        return own
    return shared


def _settle(before: RunHandle[Any], step: Step, launcher: Launcher, log: logging.Logger) -> None:
    """Before a submission: decides what an earlier run of this step is to this try, and ends what it is not to take."""
    labels = launcher.labels or {}
    same_training = before.labels.get("training") == labels["training"]
    status = before.status()
    if goes_on(
        status.state,
        same_training=same_training,
        same_generation=before.labels.get("generation") == step.generation,
        from_failure=step.from_failure,
        handed=handover.taker_of(before) is not None,
    ):
        return
    why = "this is a re-execution" if same_training else "the function or its arguments have changed"
    log.info("%s, so the training begins from scratch", why)
    if not status.final:
        before.cancel()
        before.wait(launcher.stop_grace + CANCEL_TIMEOUT)
    before.mark_delivered()


@contextlib.contextmanager
def _shared(launcher: Launcher, step: Step, log: logging.Logger) -> Iterator[None]:
    """Around a run that outlives this process: decides about it when its start or its following is interrupted."""
    try:
        yield
    except RankZeroError:
        # The run's own end, or it has not begun.
        raise
    except BaseException as error:
        # Found by its name: the interrupt may have come before there was a handle. What cannot be found or cancelled
        # now is ended by its lease.
        with contextlib.suppress(Exception):
            handle = launcher.find()
            if handle and _leaves(error, step):
                what = type(error).__name__
                log.warning("%s; the training in %s goes on, and the next try takes it up", what, handle.directory)
            elif handle:
                handle.cancel()
                handle.wait(launcher.stop_grace + CANCEL_TIMEOUT)
        raise


def _leaves(error: BaseException, step: Step) -> bool:
    if isinstance(error, dg.DagsterExecutionInterruptedError):
        return step.another_follows and not step.was_ended_by_a_user()
    return step.another_follows and isinstance(error, Exception)


def follow(
    handle: RunHandle[Any], since: dict[int, Position], on_line: Callable[[str], None], interval: float | None
) -> Iterator[dict[str, Any]]:
    """Shows what the ranks write until the run has ended.

    Args:
        handle: The run.
        since: Where each rank's lines begin.
        on_line: Gets every line, with its ``[rank]`` prefix.
        interval: Seconds between two looks at the metrics at least; None for no look.

    Yields:
        Rank 0's metrics, the last value of each, whenever they have changed.
    """
    positions = dict(since)
    pause = FOLLOW_INTERVAL_REMOTE if is_url(handle.directory) else FOLLOW_INTERVAL
    seen: dict[str, Any] = {}
    next_look = 0.0
    while True:
        status = handle.status()
        for line in handle.lines(positions, follow=False, prefix=True):
            on_line(line)
        if status.final:
            return
        if interval is not None and status.metrics != seen and time.monotonic() >= next_look:
            seen, next_look = status.metrics, time.monotonic() + interval
            yield status.metrics
        handle.wait(pause)


def hand(handle: RunHandle[Any], step: Step | None) -> None:
    """Before the value goes to Dagster: notes that somebody gets it."""
    if step is not None:
        handover.note(handle, dagster_run=step.dagster_run, number=step.number)


def _facts_of(train: Any) -> Any:
    """What tells a function from another one: its name, and the plain values that are bound to it."""
    if isinstance(train, str) or hasattr(train, "__fspath__"):
        return str(train)
    if isinstance(train, functools.partial):
        return _facts_of(train.func), train.args, train.keywords
    name = f"{getattr(train, '__module__', '')}:{getattr(train, '__qualname__', type(train).__qualname__)}"
    cells = [cell.cell_contents for cell in getattr(train, "__closure__", None) or () if _is_filled(cell)]
    return name, [value for value in cells if _is_plain(value)]


def _is_filled(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not cell
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))
