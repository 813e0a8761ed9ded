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
from rankzero.run.identity import Asked, Decision, describe
from rankzero.run.tries import PipelineTry, attempt, detaching
from rankzero.submit import datasets, drivers, existing
from rankzero.submit.drivers import open_owned
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
    handle: RunHandle[Any] | None = None
    # The handle, once there is one: under the same id there may be a later submission by then.
    with detaching(lambda: handle or existing.find(run), caller, request.template.stop_grace, log):
        template = replace(request.template, generation=caller.generation)
        request = replace(request, template=template, caller=caller)
        before = existing.find(run)
        repeated = as_repeated(request, before, caller.generation) if before else request
        kept = {name: source for name, source in repeated.sources.items() if source is not request.sources[name]}
        found = None
        if before:
            asked = repeated.asked(train, repeated.identity_of(train, args, kwargs))
            found = _reconcile(run, asked, caller, log)
        if found and found.decision in (Decision.ATTACH, Decision.DELIVER):
            # Spark may have computed checksums of datasets for minutes, and another try submitted the run meanwhile.
            handle = RunHandle(run.directory, job=found.job)
            has_changed = bool(existing.changes(found))
            log.log(logging.WARNING if has_changed else logging.INFO, "%s", existing.following(found, run.directory))
            # An earlier try may have been the last one, and have shortened the lease.
            lease = caller.lease_when_attached or found.job.orphan_timeout
            if lease is not None and not handle.status().final:
                handle.hold(lease)
            yield Opened(handle, attached=True)
            return
        resumes = found is not None and found.decision is Decision.RESUME
        if not kept or (resumes and datasets.are_readable(kept, request.sources, request.engine)):
            request = repeated
        if caller.is_followed_by_another:
            handle, is_new = drivers.start(request, train, args, kwargs)
            if is_new:
                log.info("started the run in %s, which outlives this process: %s", run.directory, handle.beginning)
            else:
                log.info("attached to the run in %s, which was submitted meanwhile", run.directory)
            yield Opened(handle, attached=not is_new)
            if request.trackers:
                attempt(log, "the wait for its trackers", functools.partial(_await_trackers, handle), None)
            return
    with open_owned(request, train, args, kwargs) as owned:
        log.info("started the run in %s, which ends with this process: %s", owned.directory, owned.beginning)
        yield Opened(owned)


def as_repeated(request: Request, before: RunHandle[Any], generation: str) -> Request:
    """Returns the request with the datasets of an earlier try of the same chain.

    A dataset that has changed since does not make an automatic try another training.
    """
    kept = datasets.of_earlier_try(RunDirectory(before.directory), request.sources, generation)
    return replace(request, sources={**request.sources, **kept}) if kept else request


def _await_trackers(handle: RunHandle[Any]) -> None:
    if handle.status().final:
        # The container may be removed when this process exits.
        handle.await_driver(bounds.TRACKERS_TIMEOUT())


def _reconcile(run: RunDirectory, asked: Asked, caller: PipelineTry, log: Any) -> existing.Existing | None:
    """Decides what the run is to this try, as `submission.submit` does. A living run of another training is ended."""
    if (found := existing.assess(run, asked, caller)) is None:
        return None
    if found.decision is Decision.FRESH and not found.status.final:
        RunHandle[Any](run.directory, job=found.job).cancel(reason="another training was submitted in its place")
        existing.await_end(run, found.job)
        log.warning("ended the run in %s: changed since: %s", run.directory, describe(found.comparison.differing))
    return found
