"""Opens the durable run of a pipeline step: a try of the step starts the run, or attaches to that of an earlier try."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rankzero import bounds
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.tries import PipelineTry, attempt, detaching
from rankzero.submit import drivers, existing
from rankzero.submit.prepare import Request


@dataclass(frozen=True)
class Opened:
    """The run that a try of a step follows.

    Attributes:
        handle: The run.
        attached: True if another try has started the run.
    """

    handle: RunHandle[Any]
    attached: bool = False


@contextlib.contextmanager
def open_durable(
    request: Request,
    train: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: PipelineTry,
    log: Any,
) -> Iterator[Opened]:
    """Yields the run of a step's training, which is a new one or the run that an earlier try has left.

    If another try of the step can follow, the run outlives this process. It then ends with the block only if an
    exception interrupts the block that the `PipelineTry` does not detach from. Without another try, the run ends with
    the block and with this process.

    Args:
        request: The launcher's request, with a run id.
        train: As for `Launcher.run`.
        args: As for `Launcher.run`.
        kwargs: As for `Launcher.run`.
        caller: The step.
        log: The step's logger.

    Raises:
        InvalidJobError: the job cannot be run as described, or the store cannot be used.
        EngineError: an earlier run was asked to stop and does not end.
    """
    run = RunDirectory(request.directory)
    request = replace(request, template=replace(request.template, generation=caller.generation), caller=caller)
    handle: RunHandle[Any] | None = None
    is_owned = False
    # The handle, once there is one: under the same id there may be a later submission by then. A run that ends with
    # the block needs nothing.
    find = lambda: None if is_owned else handle or existing.find(run)  # noqa: E731
    opens = drivers.started if caller.is_followed_by_another else drivers.opened
    with detaching(find, caller, request.template.stop_grace, log), opens(request, train, args, kwargs) as started:
        handle, found = started.handle, started.existing
        is_owned = found is None and not caller.is_followed_by_another
        if found:
            has_changed = bool(existing.changes(found))
            log.log(logging.WARNING if has_changed else logging.INFO, "%s", existing.following(found, run.directory))
            # An earlier try may have been the last one, and have shortened the lease.
            lease = caller.lease_when_attached or found.job.orphan_timeout
            if lease is not None and not handle.status().final:
                handle.hold(lease)
        else:
            how = "ends with" if is_owned else "outlives"
            log.info("started the run in %s, which %s this process: %s", run.directory, how, handle.job.beginning)
        yield Opened(handle, attached=found is not None)
        if not (found or is_owned) and request.trackers:
            attempt(log, "the wait for its trackers", functools.partial(_await_trackers, handle), None)


def _await_trackers(handle: RunHandle[Any]) -> None:
    if handle.status().final:
        # The container may be removed when this process exits.
        handle.await_driver(bounds.TRACKERS_TIMEOUT())
