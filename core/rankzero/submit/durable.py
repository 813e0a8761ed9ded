"""Opens runs: one that ends with this process, one that outlives it, and the durable run of a pipeline step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rankzero import bounds
from rankzero.errors import InvalidJobError, located
from rankzero.host.processes import this_process
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.tries import PipelineTry, detaching
from rankzero.submit import drivers, existing
from rankzero.submit.existing import Existing
from rankzero.submit.start import Request, Submitter

OWNER_LEASE = bounds.stretched(20.0)  # For which a driver on the cluster outlives its run's owner process


def submit(request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunHandle[Any]:
    """Starts a run that outlives this process, or attaches to the run that is there.

    Raises:
        InvalidJobError: the job was rejected before anything started, as in a rank: all its processes end with it.
    """
    if "RANKZERO_SCRATCH" in os.environ and not request.engine.drives_elsewhere:
        raise InvalidJobError(
            "submit() was called in a rank, and the run would end with it: call run(), choose SparkSubmitEngine, whose "
            "driver is on the cluster, or return a value with which the pipeline submits the run"
        )
    with _opened(request, train, args, kwargs) as (handle, _):
        return handle


@contextlib.contextmanager
def _opened(
    request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, owned: bool = False
) -> Iterator[tuple[RunHandle[Any], Existing | None]]:
    """Opens a run, or attaches to the run that is there, which it yields, too. Raises like `open_durable`.

    One that is owned ends with the block and with this process, any other outlives both.
    """
    engine = request.engine
    if owned:
        template = replace(request.template, owner=this_process())
        if engine.drives_elsewhere:
            template = replace(template, orphan_timeout=min(OWNER_LEASE(), template.orphan_timeout or OWNER_LEASE()))
        request = replace(request, template=template)
    submitter = Submitter(request, train, args, kwargs, detached=not owned or engine.prefers_own_process)
    with submitter.recording_end():
        submitter.submit()
        if found := submitter.existing:
            handle = RunHandle[Any](submitter.run.directory, job=found.own.job)
        elif not owned:
            handle = drivers.start(submitter.submission, request)
        else:
            own = submitter.submission
            with located(own.run.directory), drivers.driving(own, request) as handle:
                handle.attached = False
                yield handle, None
                if request.trackers:
                    # The container may be removed when this process exits.
                    handle.await_driver(bounds.TRACKERS_TIMEOUT())
            return
    handle.attached = found is not None
    yield handle, found


@contextlib.contextmanager
def open_owned(request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RunHandle[Any]]:
    """Yields the handle of a run that ends with the block, whatever ends the block, and with this process.

    Raises:
        InvalidJobError: the job was rejected before anything started, or the run is running already.
    """
    with _opened(request, train, args, kwargs, owned=True) as (handle, _):
        if handle.attached and not handle.status().final:
            raise InvalidJobError(
                f"run_id {handle.id!r} is running: attach to it with RunHandle.attach({handle.directory!r}), or choose "
                "another run_id"
            ).locate(handle.directory)
        # Of one that was there, the caller died before the result was delivered.
        yield handle


@contextlib.contextmanager
def open_durable(
    request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: PipelineTry, log: Any
) -> Iterator[RunHandle[Any]]:
    """Yields the run of a step's training, which is a new one or the run that an earlier try has left.

    If another try of the step can follow, the run outlives this process. It then ends with the block only if an
    exception interrupts the block that the `PipelineTry` does not detach from. Without another try, the run ends with
    the block and with this process.

    Args:
        request: The launcher's request, with a run id.
        train: As for `Launcher.run`, as are the arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.
        caller: The step.
        log: The step's logger.

    Raises:
        InvalidJobError: the job cannot be run as described, or the store cannot be used.
        EngineError: a cluster does not accept the driver, or an earlier run was asked to stop and does not end.
    """
    run = RunDirectory(request.directory)
    request = replace(request, template=replace(request.template, generation=caller.generation), caller=caller)
    known: RunHandle[Any] | None = None
    is_owned = False
    # The handle, once there is one: under the same id there may be a later submission by then. A run that ends with
    # the block needs nothing.
    find = lambda: None if is_owned else known or existing.find(run)  # noqa: E731
    owned = not caller.is_followed_by_another
    with (
        detaching(find, caller, request.template.stop_grace, log),
        _opened(request, train, args, kwargs, owned=owned) as (handle, found),
    ):
        known, is_owned = handle, found is None and owned
        if found:
            say = log.warning if found.changes else log.info
            say("%s", found.following)
            # An earlier try may have been the last one, and have shortened the lease.
            lease = caller.lease_when_attached or found.own.job.orphan_timeout
            if lease is not None and not handle.status().final:
                handle.hold(lease)
        else:
            how = "ends with" if is_owned else "outlives"
            log.info("started the run in %s, which %s this process: %s", run.directory, how, handle.job.beginning)
        yield handle
        if not (found or is_owned) and request.trackers:
            # The result is stored: a store that fails now must not fail the step.
            with contextlib.suppress(Exception):
                if handle.status().final:
                    # The container may be removed when this process exits.
                    handle.await_driver(bounds.TRACKERS_TIMEOUT())
