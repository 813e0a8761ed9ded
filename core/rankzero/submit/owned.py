"""Opens runs that end with the process that started them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rankzero import bounds
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.driver.driver import Driver, DriverThread
from rankzero.errors import InvalidJobError
from rankzero.host.processes import this_process
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.submit import drivers
from rankzero.submit.prepare import Request, prepare

OWNER_LEASE = 20.0
"""Seconds that a driver on the cluster continues without its run's owner process: less than `CANCEL_TIMEOUT`."""


@contextlib.contextmanager
def open_owned(request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RunHandle[Any]]:
    """Opens a run that ends with the block, whatever ends the block, and with this process.

    Yields:
        The handle, to be followed until the run has ended.

    Raises:
        InvalidJobError: the job was rejected before anything started.
    """
    engine = request.engine
    stop_timeout = request.template.stop_grace + CANCEL_TIMEOUT
    template = replace(request.template, owner=this_process())
    if engine.drives_elsewhere:
        template = replace(template, orphan_timeout=min(OWNER_LEASE, template.orphan_timeout or OWNER_LEASE))
    request = replace(request, template=template)
    run, started = prepare(request, train, args, kwargs, detached=engine.prefers_own_process)
    if not started:
        handle = RunHandle.attach(run.directory)
        if not handle.status().final:
            raise InvalidJobError(
                f"run_id {handle.id!r} is running: attach to it with RunHandle.attach({run.directory!r}), or choose "
                "another run_id"
            )
        # The run succeeded, and its caller died before the result was delivered.
        yield handle
        return
    if engine.drives_elsewhere:
        driver = _leased_driver(run, request, stop_timeout)
    elif engine.prefers_own_process:
        driver = _process_driver(run, request.private(), stop_timeout)
    else:
        driver = _thread_driver(run, Driver(run, engine, dict(request.env), trackers=request.trackers), stop_timeout)
    with driver as handle:
        yield handle
        if request.trackers:
            # The container may be removed when this process exits.
            handle.await_driver(bounds.TRACKERS_TIMEOUT)


@contextlib.contextmanager
def _leased_driver(run: RunDirectory, request: Request, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver on the cluster, which ends its run with the block, or when no process follows the run."""
    try:
        yield drivers.start(run, request)
    finally:
        # The driver's own status decides: this process may only have counted the driver as dead.
        if not run.status().final:
            handle = RunHandle[Any](run.directory)
            handle.cancel()
            handle.wait(stop_timeout)


@contextlib.contextmanager
def _process_driver(run: RunDirectory, private: dict[str, Any], stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver process, which ends its run with the block or with this process."""
    theirs, ours = os.pipe()
    owner = os.getpid()
    handle: RunHandle[Any] | None = None
    try:
        try:
            handle = RunHandle(run.directory, drivers.start_driver(run, private, theirs))
        finally:
            os.close(theirs)
        yield handle
    finally:
        # After an interrupt, this byte ends the run immediately, even if its directory is on a slow store. The end of
        # file alone would come only after every child that was forked meanwhile has exited.
        with contextlib.suppress(OSError):
            if os.getpid() == owner:
                os.write(ours, b"\n")
        os.close(ours)
        if handle:
            handle.wait(stop_timeout)


@contextlib.contextmanager
def _thread_driver(run: RunDirectory, driver: Driver, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver in a thread of this process, which ends its run with the block."""
    thread = DriverThread(driver)
    try:
        # Within the block: an interrupt may arrive as soon as the thread has started.
        thread.start()
        yield RunHandle(run.directory, thread)
    except BaseException as interrupt:
        thread.driver.inbox.interrupt(
            f"the caller was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": ")
        )
        raise
    else:
        if not (driver.status.final or driver.status.certain):
            # The caller saw a final status that the driver did not write: no training may continue without an owner.
            driver.inbox.interrupt("the process that called run() no longer follows it")
    finally:
        if thread.ident is not None:
            thread.await_end(stop_timeout)
    if thread.error:
        raise thread.error
