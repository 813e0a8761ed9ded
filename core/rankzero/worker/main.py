"""One rank. Imports torch, takes its orders from the agent, calls the user's code, commits.

ready            torch is imported
<- start         rank, environment, where the payload lies
rendezvous       rank 0 only: the port it bound
<- go            where rank 0 listens: MASTER_ADDR and MASTER_PORT
entered          when it started, had torch, and calls the user's code
beat             every few seconds, from a thread: progress so far
metric           rows of reports, several at a time
checkpoint
<- checkpoint    one was committed
returned         the user's code has ended well
commit | failure the outcome, before anything else can go wrong
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rankzero.channel.frames import Message
from rankzero.errors import ResultError
from rankzero.host.descendants import die_with_parent
from rankzero.host.processes import settle_signals
from rankzero.worker import failures, flight, rendezvous
from rankzero.worker.call import call
from rankzero.worker.control import Control, out_of_reach
from rankzero.worker.leaving import run_exit_handlers
from rankzero.worker.returned import paths_that_go

if TYPE_CHECKING:
    from rankzero.train.parts import Parts

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a worker write the Python stack of its main thread, also while that is blocked in native code."""

INLINE_LIMIT = 64 << 10
"""Bytes of JSON up to which a value travels in the commit itself."""


HOROVOD = "RANKZERO_HOROVOD"
"""Set to ``1`` in ``env=``: every rank lets ``import horovod.torch`` find `rankzero.compat.horovod`."""


def main(control_fd: int, stack_fd: int, agent_pid: int, exit_timeout: float) -> NoReturn:
    """Entry point of the worker process."""
    phases = {"started": time.time()}
    settle_signals()
    die_with_parent(agent_pid)
    for stream in (sys.stdout, sys.stderr):
        # As on a terminal: a line is seen when it is written, and costs one write.
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
    # The crashing thread alone: the stacks of all would push the last lines of the rank out of the log tail.
    faulthandler.enable(all_threads=False)
    stack_fd = out_of_reach(stack_fd)
    # That of the thread which it interrupts, the main one: to walk others that run may crash (CPython issue 116008).
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=False)
    control = Control(control_fd)
    ending = contextlib.ExitStack()
    try:
        outcome = _work(control, ending, phases)
    except BaseException as error:
        if not control.is_own:
            _leave_fork(error)
        outcome = failures.describe(error)
    control.finish(outcome)
    if outcome["type"] == "failure":
        # The next attempt goes on from what was reported; the agent ends this within its grace.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(BaseException):
            ending.close()
    control.flush()
    if outcome["type"] == "commit":
        # Peers may still be on their way to this rank: a group that they are making breaks when it exits. Rank 0 holds
        # the rendezvous store, too.
        control.ended.wait()
        run_exit_handlers(exit_timeout)
    _flush()
    os._exit(0 if outcome["type"] == "commit" else outcome["exit_code"] or 1)


def _work(control: Control, ending: contextlib.ExitStack, phases: dict[str, float]) -> Message:
    """Does all that this rank is for; what is to be finished even if it fails is left to ``ending``."""
    try:
        import torch
    except ImportError as error:
        return failures.no_torch(error)
    phases["imported"] = time.time()
    control.send({"type": "ready", "torch": torch.__version__})
    start = control.receive()
    from rankzero.train import context, parts
    from rankzero.train import writer as writers

    start["context"]["backend"] = _backend(start["context"]["backend"], context.accelerator)
    world = context.TrainContext(**start["context"])
    files = parts.Parts(start, control.fetch)
    writer = writers.CheckpointWriter(files, world.attempt, world.rank, world.world_size, control.send)
    session = context.install(world, control.report, writer, files, start["datasets"], start["scratch"])
    if start["checkpoint"]:
        writer.committed(start["checkpoint"])
    os.environ.update(start["env"])
    if start["context"]["rank"] == 0:
        control.send({"type": "rendezvous", "port": rendezvous.bind(start)})
    rendezvous.guard_groups()
    rendezvous.meet(control.receive(), start["context"]["rank"])
    control.listen(lambda message: _dump(start) if message["type"] == "dump" else writer.on_message(message))
    if start["context"]["backend"] == "nccl" and not torch.cuda.is_available():
        raise RuntimeError(
            f"use_gpu=True and this task was given the GPUs {os.environ['CUDA_VISIBLE_DEVICES']!r}, but torch "
            f"{torch.__version__} cannot use CUDA on {socket.gethostname()}: install a CUDA build of torch and "
            'a driver, or choose backend="gloo"'
        )
    _count_optimizer_steps(session)
    control.beat(start["beat_interval"], session.count_progress)
    if os.environ.get(HOROVOD) == "1":
        importlib.import_module("rankzero.compat.horovod.install").install()
    ending.callback(writer.finish)
    control.send({"type": "entered", **phases, "time": time.time(), "torch": torch.__version__})
    value = call(start, control.fetch)
    if not control.is_own:
        _leave_fork(None)
    for function in session.at_return:
        # It may wait for peers, which are still trained.
        function()
    # Whoever is asked to exit from here on has finished, and gets the grace for what is left to write.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.send({"type": "returned", "time": time.time()})
    writer.finish()
    if value is None:
        value = session.result
    for path in paths_that_go(value):
        print(f"rankzero: {path}, which is returned, is deleted with the run: return what it holds, or report it")
    return _commit(value, start, files)


def _leave_fork(error: BaseException | None) -> NoReturn:
    """Ends a process that the rank has forked, and whose copy of the training function has ended: it is no rank."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    else:
        sys.stderr.write(f"rankzero: process {os.getpid()}, forked by this rank, has left the training function\n")
    _flush()
    os._exit(code)


def _backend(asked: str | None, accelerator: Callable[[], str | None]) -> str | None:
    """The backend for the GPUs that are here: the driver does not know whose they are."""
    return "xccl" if asked == "nccl" and accelerator() == "xpu" else asked


def _dump(start: Message) -> None:
    """This rank hangs: the stacks of all its threads, and what its collectives do, in its log."""
    # None of them runs meanwhile: this one has the interpreter's lock.
    faulthandler.dump_traceback(file=2, all_threads=True)
    context = start["context"]
    place = context["storage_path"]
    directory = os.path.join(place, "flight", f"attempt-{context['attempt']}") if place else None
    try:
        lines = flight.dump(directory, context["rank"])
    except Exception as error:
        lines = [f"rankzero: flight recorder: {type(error).__name__}: {error}"]
    # Not by sys.stderr, whose lock a thread that hangs may hold.
    os.write(2, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _count_optimizer_steps(session: Any) -> None:
    """Every step of a torch optimizer is progress."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register:

        def count(*_: object) -> None:
            session.progress += 1

        register(count)


def _commit(value: object, start: Message, files: Parts) -> Message:
    """The record of success; rank 0's carries the value or names the file that holds it, on a store its URL."""
    commit: Message = {"type": "commit", "time": time.time()}
    if start["context"]["rank"] != 0:
        return commit
    from rankzero.values import formats

    file_format = formats.choose(value)
    path = os.path.join(start["result_directory"], f".committing-{os.getpid()}.{file_format}")
    try:
        size, digest = formats.write(value, file_format, path)
    except OSError as error:
        raise ResultError(f"rank 0 returned, but its value could not be written: {error}") from error
    summary = formats.summarize(value)
    result = {"format": file_format, "size": size, "digest": digest, "path": path, "summary": summary}
    if file_format == formats.JSON and size <= INLINE_LIMIT:
        result["value"] = value
        return {**commit, "result": result}
    summary |= _view(value)
    if size > INLINE_LIMIT and (url := files.upload_value(path, f"value-{start['context']['attempt']}.{file_format}")):
        os.unlink(path)
        result["path"] = url
    return {**commit, "result": result}


def _view(value: object) -> dict[str, Any]:
    """Returns a small value whose numbers are numpy's or torch's as plain JSON, for XComs and pages; else nothing."""
    from rankzero.values.plain import plain_view

    # Numbers of the user's own types may raise anything, and the training has already returned.
    with contextlib.suppress(Exception):
        view = plain_view(value, INLINE_LIMIT // 2)
        if len(json.dumps(view)) <= INLINE_LIMIT:
            return {"value": view}
    return {}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
