"""Runs that end with the process that started them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.driver.driver import Driver
from rankzero.driver.thread import DriverThread
from rankzero.driver.trackers import FLUSH_TIMEOUT
from rankzero.errors import InvalidJobError
from rankzero.host.processes import this_process
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.submit import drivers
from rankzero.submit.prepare import Request, prepare

OWNER_LEASE = 20.0
"""Seconds for which a driver elsewhere goes on without the process that owns its run: less than `CANCEL_TIMEOUT`."""


@contextlib.contextmanager
def open_owned(request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RunHandle[Any]]:
    """A run that ends with the block, however that ends, and with this process.

    Yields:
        The handle, to be followed until the run has ended.

    Raises:
        InvalidJobError: refused before anything started.
    """
    engine = request.engine
    patience = request.template.stop_grace + CANCEL_TIMEOUT
    template = replace(request.template, owner=this_process())
    if engine.drives_elsewhere:
        template = replace(template, orphan_timeout=min(OWNER_LEASE, template.orphan_timeout or OWNER_LEASE))
    request = replace(request, template=template)
    run, started = prepare(request, train, args, kwargs, detached=engine.prefers_own_process)
    if not started:
        handle = RunHandle[Any](run.directory)
        if not handle.status().final:
            raise InvalidJobError(
                f"run_id {handle.id!r} is running: attach to it with RunHandle.attach({run.directory!r}), or choose "
                "another run_id"
            )
        # It succeeded, and whoever waited for it died before its result was delivered.
        yield handle
        return
    if engine.drives_elsewhere:
        driver = _leased_driver(run, request, patience)
    elif engine.prefers_own_process:
        driver = _process_driver(run, request.private(), patience)
    else:
        driver = _thread_driver(run, Driver(run, engine, dict(request.env), trackers=request.trackers), patience)
    with driver as handle:
        yield handle
        if request.trackers:
            # This process may be all that keeps its container.
            handle.await_driver(FLUSH_TIMEOUT)


@contextlib.contextmanager
def _leased_driver(run: RunDirectory, request: Request, patience: float) -> Iterator[RunHandle[Any]]:
    """A driver that the engine starts elsewhere; it ends its run when the block does, or when nobody follows it."""
    try:
        yield drivers.start(run, request)
    finally:
        # By the driver's own status: a verdict of this process is no end of the training.
        if not run.status().final:
            handle = RunHandle[Any](run.directory)
            handle.cancel()
            handle.wait(patience)


@contextlib.contextmanager
def _process_driver(run: RunDirectory, private: dict[str, Any], patience: float) -> Iterator[RunHandle[Any]]:
    """A driver in a process of its own, which ends its run when this process, or the block, does."""
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
        # After an interrupt this is what ends the run, at once, wherever its directory lies. Not its end of file alone,
        # for which every child would have to end that was forked meanwhile.
        with contextlib.suppress(OSError):
            if os.getpid() == owner:
                os.write(ours, b"\n")
        os.close(ours)
        if handle:
            handle.wait(patience)


@contextlib.contextmanager
def _thread_driver(run: RunDirectory, driver: Driver, patience: float) -> Iterator[RunHandle[Any]]:
    """A driver in a thread of this process, which ends its run when the block does."""
    thread = DriverThread(driver)
    thread.start()
    try:
        yield RunHandle(run.directory, thread)
    except BaseException as interrupt:
        thread.driver.inbox.interrupt(
            f"the caller was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": ")
        )
        raise
    else:
        if not (driver.status.final or driver.status.certain):
            # The caller saw an end that the driver did not write: no training goes on without an owner.
            driver.inbox.interrupt("the process that called run() no longer follows it")
    finally:
        thread.await_end(patience)
    if thread.error:
        raise thread.error
