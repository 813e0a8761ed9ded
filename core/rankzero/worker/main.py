"""Main function of one rank: imports torch, receives ``start`` from the agent, calls the user's code, commits.

`rankzero.channel.messages` lists what rank and agent send each other, in its order.
When a rank hangs, it writes its stacks and what torch's flight recorder has to its log.
Reports are appended to a file, which the agent reads: the last one before a SIGKILL arrives, too.
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
import threading
import time
import traceback
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rankzero.channel import messages
from rankzero.errors import ResultError
from rankzero.host import forks
from rankzero.host.processes import caught_signals, end_with_parent, settle_signals
from rankzero.worker import failures, rendezvous
from rankzero.worker.call import call, run_exit_handlers
from rankzero.worker.control import Control

if TYPE_CHECKING:
    from rankzero.train.parts import Parts

Adopt = Callable[[dict[str, str]], object]

# On these signals, of crashes, faulthandler writes a stack.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})

INLINE_LIMIT = 64 << 10  # Most bytes of JSON of a value that is sent inside the commit message

_RECORDERS = ("nccl", "fr")
_COLLECTIVES_SHOWN = 20  # Most uncompleted collectives of the flight recorder that the log shows: the last ones

_LOST_RESULT = (
    "the run has lost its value: an attempt before this one called rankzero.train.set_result, and this attempt, which "
    "resumed from a checkpoint, did not. Put what the value is made of into the checkpoint, and call set_result again "
    "when an attempt begins with it"
)


def main(control_fd: int, reports_fd: int, agent_pid: int, adopt: Adopt = os.environ.update) -> NoReturn:
    """Entry point of the worker process. A fork has no environment of its own before it can ``adopt`` its rank's."""
    phases = {"started": time.time()}
    settle_signals()
    end_with_parent(agent_pid)
    for stream in (sys.stdout, sys.stderr):
        # Line buffered, as on a terminal: a line is visible when it is printed, and costs one write.
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
    _show_crashes(frozenset())
    control = Control(control_fd, reports_fd)
    ending = contextlib.ExitStack()
    try:
        outcome = _work(control, ending, phases, adopt)
    except BaseException as error:
        if not control.is_own:
            _leave_fork(error)
        # Before the driver knows, and stops this rank: the next attempt needs the checkpoints that were reported. The
        # agent limits this by its grace.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        outcome = failures.describe(error)
    control.finish(outcome)
    if isinstance(outcome, messages.Failed):
        with contextlib.suppress(BaseException):
            ending.close()
    control.flush()
    if isinstance(outcome, messages.Finished):
        # Peers may still be connecting to this rank, and their group breaks if it exits. Rank 0 also serves the
        # rendezvous store.
        control.ended.wait()
        run_exit_handlers(control.exit_timeout)
    forks.leave(outcome.exit_code or 1 if isinstance(outcome, messages.Failed) else 0)


def _work(
    control: Control, ending: contextlib.ExitStack, phases: dict[str, float], adopt: Adopt
) -> messages.Finished | messages.Failed:
    """Runs the rank up to its outcome; ``ending`` gets the work that must finish even after a failure."""
    try:
        import torch
    except ImportError as error:
        return failures.no_torch(error)
    phases["imported"] = time.time()
    has_made_group = rendezvous.guard_groups()
    control.send(messages.Reached("ready"))
    if not isinstance(start := control.expect(messages.Assign), messages.Start):  # Rank 0's comes ahead of its files
        control.send(messages.Reached("bound", {"port": rendezvous.bind(start)}))
        start = control.expect(messages.Start)
    # First: the devices that torch sees when it is asked for them are this process's from then on.
    adopt(start.env)
    control.exit_timeout = start.exit_timeout
    # A rank that was forked ahead has waited for its agent.
    phases = {name: max(when, start.began) for name, when in phases.items()}
    from rankzero.train import context, parts
    from rankzero.train import writer as writers

    if start.context["backend"] == "nccl" and context.accelerator() == "xpu":
        # Of Intel's GPUs.
        start.context["backend"] = "xccl"
    world = context.TrainContext(**start.context)
    files = parts.Parts(start, control.fetch, control.put)
    writer = writers.CheckpointWriter(files, world.attempt, world.rank, world.world_size, control.send, control.flush)
    session = context.install(world, control.report, writer, files, start.datasets, start.scratch)
    if start.checkpoint:
        writer.committed(start.checkpoint)
    rendezvous.meet(control.expect(messages.Go), start.context["rank"])

    def on_message(message: messages.Message) -> None:
        writer.on_message(message)
        _show_stack(message, control.send)

    control.listen(on_message)
    if start.context["backend"] == "nccl" and not torch.cuda.is_available():
        raise RuntimeError(
            f"use_gpu=True and this task was given the GPUs {os.environ['CUDA_VISIBLE_DEVICES']!r}, but torch "
            f"{torch.__version__} cannot use CUDA on {socket.gethostname()}: install a CUDA build of torch and "
            'a driver, or choose backend="gloo"'
        )
    _count_optimizer_steps(session)

    def count_progress() -> int:
        _show_crashes(caught_signals(os.getpid()))
        return session.count_progress()

    control.beat(start.beat_interval, count_progress)
    ending.callback(writer.finish)
    control.send(messages.Reached("entered", {**phases, "time": time.time(), "torch": torch.__version__}))
    value = call(start, control.fetch, lambda: bool(session.has_result or session.count_progress() or has_made_group()))
    if not control.is_own:
        _leave_fork(None)
    for function in session.at_return:
        # The function may wait for peers that still train.
        function()
    # The training has finished: after a SIGTERM from here on, the rank uses the grace to finish its writes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        # A timer that the function has left must not raise where its value is stored.
        signal.setitimer(timer, 0)
    control.send(messages.Reached("returned", {"time": time.time()}))
    writer.finish()
    if value is None:
        if start.context["rank"] == 0 and writer.had_result and not session.has_result:
            raise ResultError(_LOST_RESULT)
        value = session.result
    return _commit(value, start, files)


def _show_crashes(caught: Set[int] | None) -> None:
    """Makes this process write a stack to its log when it crashes.

    Libraries that restore all handlers, as Lightning's Trainer does after each ``fit``, remove those of faulthandler,
    which `signal.getsignal` does not see. Each heartbeat therefore puts back those that are missing.

    Args:
        caught: The signals for which this process has handlers, from any library; None if it is not known.
    """
    if caught is not None and not caught & _CRASHES:
        faulthandler.disable()
        # The crashing thread alone: the stacks of all would push the last lines of the rank out of the log tail.
        faulthandler.enable(file=2, all_threads=False)


def _leave_fork(error: BaseException | None) -> NoReturn:
    """Exits a process that the rank has forked and in which the training function has ended: it is no rank."""
    if error is None:
        sys.stderr.write(f"rankzero: process {os.getpid()}, forked by this rank, has left the training function\n")
    forks.leave(forks.exit_code(error) if error else 0)


def _show_stack(message: messages.Message, send: Callable[[messages.Message], None]) -> None:
    """Replies to a request for this rank's stack, in the thread that receives it; its log shows more, if asked to."""
    if not isinstance(message, messages.Dump):
        return
    frames = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    lines = [f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}' for frame, line in frames]
    shown = [line.strip() for line in lines if not failures.is_own_frame(line)]
    send(messages.Stack("\n".join(shown), time.process_time()))
    if message.quiet:
        return
    # No other thread runs meanwhile, since this one has the GIL.
    faulthandler.dump_traceback(file=2, all_threads=True)
    try:
        lines = _flight_recorder()
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}"]
    # Not by sys.stderr: a thread that hangs may have its lock.
    os.write(2, "".join(f"rankzero: flight recorder: {line}\n" for line in lines).encode(errors="replace"))


def _flight_recorder() -> list[str]:
    """Returns lines with each process group and the last uncompleted collectives; none if torch records nothing."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    for name in _RECORDERS:
        as_json = getattr(sys.modules["torch._C"]._distributed_c10d, f"_dump_{name}_trace_json", None)
        found = json.loads(as_json()) if as_json else {}
        if entries := found.get("entries"):
            lines = [f"process group {group}: {status}" for group, status in found.get("pg_status", {}).items()]
            waiting = [entry for entry in entries if not entry.get("retired")]
            return lines + [
                f"not completed: {entry.get('profiling_name')} #{entry.get('collective_seq_id')} of "
                f"{entry.get('process_group')}, {entry.get('state')}, sizes {entry.get('input_sizes')}"
                for entry in waiting[-_COLLECTIVES_SHOWN:]
            ]
    return []


def _count_optimizer_steps(session: Any) -> None:
    """Counts every step of a torch optimizer as progress of the rank."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register:

        def count(*_: object) -> None:
            session.progress += 1

        register(count)


def _commit(value: object, start: messages.Start, files: Parts) -> messages.Finished:
    """Returns the commit message; rank 0's has the value, or the path or URL of the file with the value."""
    if start.context["rank"] != 0:
        return messages.Finished(time.time())
    from rankzero.values import formats, pickled

    file_format = formats.choose(value)
    path = os.path.join(start.result_directory, f".committing-{os.getpid()}.{file_format}")
    try:
        try:
            size, digest = formats.write(value, file_format, path)
        except FileNotFoundError:
            # Some sites remove empty directories.
            files.check_directory()
            os.makedirs(start.result_directory, exist_ok=True)
            size, digest = formats.write(value, file_format, path)
    except BaseException as error:
        # A part of a large value may fill the disk, and the status of this run and others then finds no room.
        with contextlib.suppress(OSError):
            os.unlink(path)
        if isinstance(error, OSError):
            raise ResultError(f"rank 0 returned, but its value could not be written: {error}") from error
        raise
    summary: dict[str, Any] = {"type": pickled.type_name(value)}
    result = {"format": file_format, "size": size, "digest": digest, "path": path, "summary": summary}
    if file_format == formats.JSON and size <= INLINE_LIMIT:
        result["value"] = value
    else:
        if size < 100 * INLINE_LIMIT:
            summary |= _view(value)
        name = f"value-{start.context['attempt']}.{file_format}"
        if size > INLINE_LIMIT and (url := files.upload_value(path, name)):
            os.unlink(path)
            result["path"] = url
    if not start.shared and result["path"] == path:
        result["upload"] = "rank-0-value"
        if unsent := files.put("rank-0-value", path):
            raise ResultError(f"rank 0 returned, but its value could not be sent to the driver: {unsent}")
    return messages.Finished(time.time(), result)


def _view(value: object) -> dict[str, Any]:
    """Returns a small value with numbers of numpy or torch as plain JSON for XComs and pages; else an empty dict."""
    from rankzero.values.plain import plain_view

    # Number types of the user may raise anything, and the training has already succeeded.
    with contextlib.suppress(Exception):
        return {"value": plain_view(value, INLINE_LIMIT)}
    return {}
