"""Opens runs: one that ends with this process, one that outlives it, and the durable run of a pipeline step."""

from __future__ import annotations

import contextlib
import logging
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
from rankzero.submit.start import Request, Submitter, recording_end

logger = logging.getLogger(__name__)

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
    with opened(request, train, args, kwargs, owned=False) as handle:
        return handle


@contextlib.contextmanager
def opened(
    request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, owned: bool, log: Any = logger
) -> Iterator[RunHandle[Any]]:
    """Yields a run that is started, or the run that is there.

    A run that is owned ends with the block, whatever ends the block, and with this process; any other outlives both.

    Raises:
        InvalidJobError: the job cannot be run as described, the store cannot be used, or the run is running already.
        EngineError: a cluster does not accept the driver, or an earlier run was asked to stop and does not end.
    """
    engine = request.engine
    if owned:
        template = replace(request.template, owner=this_process())
        if engine.drives_elsewhere:
            template = replace(template, orphan_timeout=min(OWNER_LEASE(), template.orphan_timeout or OWNER_LEASE()))
        request = replace(request, template=template)
    submitter = Submitter(request, train, args, kwargs, detached=not owned or engine.prefers_own_process)
    with recording_end(submitter):
        found, own = submitter.submit(), submitter.own
        if found:
            handle = RunHandle[Any](found.own.run.directory, job=found.own.job)
        elif own and not owned:
            handle = drivers.start(own, request)
            handle.attached = False
        elif own:
            with located(own.run.directory), drivers.driving(own, request) as handle:
                handle.attached = False
                yield handle
                if request.trackers:
                    # The container may be removed when this process exits.
                    handle.await_driver(bounds.TRACKERS_TIMEOUT())
            return
    if found:
        say = log.info if request.caller and not found.changes else log.warning
        say("%s", found.following)
        if owned and request.caller is None and not handle.status().final:
            raise InvalidJobError(
                f"run_id {handle.id!r} is running: attach to it with RunHandle.attach({handle.directory!r}), or choose "
                "another run_id"
            ).locate(handle.directory)
    yield handle


@contextlib.contextmanager
def open_durable(
    request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: PipelineTry, log: Any
) -> Iterator[RunHandle[Any]]:
    """Yields the run of a step's training like `opened`, and as `rankzero.launcher.open_run` describes it."""
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
        opened(request, train, args, kwargs, owned=owned, log=log) as handle,
    ):
        known, is_owned = handle, owned and not handle.attached
        if handle.attached:
            # An earlier try may have been the last one, and have shortened the lease.
            lease = caller.lease_when_attached or handle.job.orphan_timeout
            if lease is not None and not handle.status().final:
                handle.hold(lease)
        else:
            how = "ends with" if is_owned else "outlives"
            log.info("started the run in %s, which %s this process: %s", run.directory, how, handle.job.beginning)
        yield handle
        if not (handle.attached or is_owned) and request.trackers:
            # The result is stored: a store that fails now must not fail the step.
            with contextlib.suppress(Exception):
                if handle.status().final:
                    # The container may be removed when this process exits.
                    handle.await_driver(bounds.TRACKERS_TIMEOUT())
