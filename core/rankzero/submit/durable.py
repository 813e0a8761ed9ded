"""Opens runs and starts their drivers.

A run ends with this process, or outlives it, such as the durable run of a pipeline step. Its driver is started on the
cluster if the engine can, else as a process of this machine or a thread of this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from rankzero import bounds
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import EngineError, InvalidJobError, RankZeroError, located
from rankzero.host.processes import this_process, unnamed_file
from rankzero.job import Job
from rankzero.run.directory import DRIVER_LOG, RunDirectory, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.observer import signal_cancel
from rankzero.run.tries import PipelineTry, detaching
from rankzero.submit import existing
from rankzero.submit.start import Request, Submitter, recording_end
from rankzero.threads import in_thread

logger = logging.getLogger(__name__)

OWNER_LEASE = bounds.stretched(20.0)  # For which a driver on the cluster outlives its run's owner process


def submit(request: Request, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunHandle[Any]:
    """Starts a run that outlives this process, or attaches to the run that is there. Raises like `opened`."""
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
            handle = start(own, request)
            handle.attached = False
        elif own:
            is_apart = engine.drives_elsewhere or engine.prefers_own_process
            drive = _process_driver if is_apart else _thread_driver
            stop_timeout = request.template.stop_grace + CANCEL_TIMEOUT()
            with located(own.run.directory), drive(own, request, stop_timeout) as handle:
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
    # The handle, once there is one: a later submission may have the same id. A run that ends with the block needs none.
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


# -- drivers -----------------------------------------------------------------------------------


class DriverProcess(subprocess.Popen[bytes]):
    """A driver process on this machine."""

    output: IO[bytes]  # Without a name; the driver prints to it if the run is on an object store

    def last_output(self) -> bytes:
        """Returns the end of what the driver has printed."""
        size, most = os.fstat(self.output.fileno()).st_size, 16 << 10
        return os.pread(self.output.fileno(), most, max(0, size - most))

    def cancel(self) -> None:
        """Makes the driver end the run on request, without the store."""
        if self.poll() is None:
            signal_cancel(self.pid)

    def await_end(self, timeout: float) -> None:
        """Waits until the driver has exited, or for the given seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def start(own: Submission, request: Request) -> RunHandle[Any]:
    """Starts the driver of a run in another process. Raises EngineError if a cluster does not accept it."""
    private = {**request.private(), "nonce": own.job.nonce}
    if not request.engine.drives_elsewhere:
        return RunHandle(own.run.directory, start_driver(own, private), job=own.job)
    handle = RunHandle[Any](own.run.directory, job=own.job)
    try:
        with located(own.run.directory):
            request.engine.start_driver(own, private)
    except RankZeroError as error:
        if not own.has_driver():
            raise
        logger.warning("the driver of run %s has started although its submission reported: %s", handle.id, error)
    return handle


def start_driver(own: Submission, private: dict[str, Any]) -> DriverProcess:
    """Starts a driver in its own session, with its output in ``driver.log``, and sends it values that may be secret."""
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    # Like `python -m rankzero.driver.main`, also if rankzero is only on this process's sys.path. -P: the working
    # directory is the user's, and a driver must not import from it.
    # pyspark's client of Spark Connect takes a main module without a file for a doctest, and imports its test tools.
    program = "import sys; sys.path.append(sys.argv.pop(1)); import rankzero.driver.main as driver; "
    program += "__file__ = driver.__file__; driver.main()"
    number = str(own.job.submission)
    command = [sys.executable, "-P", "-c", program, package_root, own.run.directory, "--submission", number]
    # An object store cannot append: the starter of the driver can read a file without a name.
    output: IO[bytes] = tempfile.TemporaryFile() if own.is_remote else open(own.path(DRIVER_LOG), "a+b")
    # It disappears whichever process dies, and never blocks as a pipe.
    with unnamed_file() as private_file:
        private_file.write(json.dumps(private).encode())
        private_file.seek(0)
        driver = DriverProcess(
            command, stdin=private_file, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    driver.output = output
    if own.is_remote:
        weakref.finalize(driver, output.close)
    else:
        output.close()
    return driver


@contextlib.contextmanager
def _process_driver(own: Submission, request: Request, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver in another process, which ends its run with the block, and when this process exits."""
    owner = os.getpid()
    # At an interrupt before the block the caller records the end, or requests it of a driver that has begun.
    handle = start(own, request)
    try:
        yield handle
    finally:
        # The driver's own status decides: this process may only have counted the driver as dead. A forked child that
        # leaves the block does not own the run.
        if os.getpid() == owner:

            def end() -> None:
                handle.cancel()
                if handle.wait(stop_timeout) and not own.has_driver():
                    # It died at its start, and other processes would wait for its first heartbeat.
                    own.finish(handle.status())

            # The store may not answer.
            with contextlib.suppress(Exception):
                in_thread(end).result(stop_timeout)


@contextlib.contextmanager
def _thread_driver(own: Submission, request: Request, stop_timeout: float) -> Iterator[RunHandle[Any]]:
    """Starts a driver in a thread of this process, which ends its run with the block.

    Raises EngineError if another submitter has the directory by now: it counted this process as dead.
    """
    # Imported here, because a process that only submits does not drive.
    from rankzero.driver.driver import Driver, DriverThread

    owner = os.getpid()
    # As other processes read it, with lists in place of tuples.
    own = Submission(own.run, Job.from_json(own.job.to_json()))
    if not own.claim_driver() or own.is_lost():
        raise EngineError(f"the run in {own.run.directory} was removed or submitted again before its driver started")
    driver = Driver(own, request.engine, dict(request.env), trackers=request.trackers)
    thread = DriverThread(driver)
    try:
        # Within the block: an interrupt may arrive as soon as the thread has started.
        thread.start()
        yield RunHandle(own.run.directory, thread, job=own.job)
    except BaseException as interrupt:
        driver.watch.interrupt(f"the caller was interrupted by {type(interrupt).__name__}: {interrupt}".rstrip(": "))
        raise
    else:
        if not (driver.recorder.status.final or driver.recorder.status.certain):
            # The caller saw a final status that the driver did not write: no training may continue without an owner.
            driver.watch.interrupt("the process that called run() no longer follows it")
    finally:
        # A forked child has no copy of the thread.
        if thread.ident is not None and os.getpid() == owner:
            thread.await_end(stop_timeout)
    if thread.error:
        raise thread.error
