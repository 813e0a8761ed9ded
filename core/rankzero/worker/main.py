"""One rank. Imports torch, takes its orders from the agent, calls the user's code, commits.

ready            torch is imported
<- start         rank, environment, where the payload lies
rendezvous       rank 0 only: the port it bound
<- go            where rank 0 listens: MASTER_ADDR and MASTER_PORT
beat             every few seconds, from a thread: progress so far
metric           rows of reports, several at a time
checkpoint
<- checkpoint    one was committed
commit | failure the outcome, before anything else can go wrong
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn, cast

from rankzero.channel.frames import Message
from rankzero.errors import ResultError, RetryableError
from rankzero.host.descendants import die_with_parent
from rankzero.worker import rendezvous
from rankzero.worker.control import Control

EXIT_HANDLERS_TIMEOUT = 5.0
"""Seconds that exit handlers and non-daemon threads get after the commit."""

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a worker write its Python stacks, also while it is blocked in native code."""

INLINE_LIMIT = 64 << 10
"""Bytes of JSON up to which a value travels in the commit itself."""

MESSAGE_LIMIT = 16 << 10
"""Characters of an exception's text that are kept."""

TRACEBACK_LIMIT = 64 << 10
"""Characters of a traceback that are kept (its end)."""

_FAILED = 1


def main(control_fd: int, stack_fd: int, agent_pid: int) -> NoReturn:
    """Entry point of the worker process."""
    die_with_parent(agent_pid)
    for stream in (sys.stdout, sys.stderr):
        # As on a terminal: a line is seen when it is written, and costs one write.
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
    # The crashing thread alone: the stacks of all would push the last lines of the rank out of the log tail.
    faulthandler.enable(all_threads=False)
    os.set_inheritable(stack_fd, False)
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    control = Control(control_fd)
    ending = contextlib.ExitStack()
    try:
        outcome = _work(control, ending)
    except BaseException as error:
        outcome = describe_failure(error)
    control.send(outcome)
    if outcome["type"] == "failure":
        # The next attempt goes on from what was reported; the agent ends this within its grace.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(BaseException):
            ending.close()
    control.flush()
    if outcome["type"] == "commit":
        if "result" in outcome:
            # Rank 0 holds the rendezvous store, which its peers may still be reading.
            control.ended.wait()
        _run_exit_handlers()
    _flush()
    os._exit(0 if outcome["type"] == "commit" else outcome["exit_code"])


def _work(control: Control, ending: contextlib.ExitStack) -> Message:
    """Does all that this rank is for; what is to be finished even if it fails is left to ``ending``."""
    try:
        import torch
    except ImportError as error:
        return _no_torch(error)
    control.send({"type": "ready", "torch": torch.__version__, "main_thread": threading.main_thread().ident})
    start = control.receive()
    from rankzero.train import context, parts
    from rankzero.train import writer as writers

    world = context.TrainContext(**start["context"])
    writer = writers.CheckpointWriter(
        parts.Parts(start, control.fetch), world.attempt, world.rank, world.world_size, control.send
    )
    session = context.install(world, control.report, writer)
    if start["checkpoint"]:
        writer.committed(start["checkpoint"])
    os.environ.update(start["env"])
    if start["context"]["rank"] == 0:
        control.send({"type": "rendezvous", "port": rendezvous.bind(start)})
    rendezvous.guard_groups()
    rendezvous.meet(control.receive(), start["context"]["rank"])
    control.listen(writer.on_message)
    if start["context"]["backend"] == "nccl" and not torch.cuda.is_available():
        raise RuntimeError(
            f"use_gpu=True and this task was given the GPUs {os.environ['CUDA_VISIBLE_DEVICES']!r}, but torch "
            f"{torch.__version__} cannot use CUDA on {socket.gethostname()}: install a CUDA build of torch and "
            'a driver, or choose backend="gloo"'
        )
    _count_optimizer_steps(session)
    control.beat(start["beat_interval"], session.count_progress)
    ending.callback(writer.finish)
    value = _call(start, control)
    writer.finish()
    if value is None:
        value = session.result
    return _commit(value, start)


def _count_optimizer_steps(session: Any) -> None:
    """Every step of a torch optimizer is progress."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register:

        def count(*_: object) -> None:
            session.progress += 1

        register(count)


def _call(start: Message, control: Control) -> object:
    """Loads the payload, opens references and calls the user's code."""
    from rankzero.values.envelope import open_packed
    from rankzero.values.ref import ResultRef, map_refs
    from rankzero.worker.references import path_of

    if modules := start["modules"]:
        # The caller's own modules come before installed ones, as they did there.
        sys.path.insert(0, modules)
    # The agent has compared its checksum with what the driver recorded.
    payload = open_packed(start["payload"])

    def open_ref(ref: ResultRef) -> object:
        path = path_of(ref, start, control.fetch)
        return path if payload["kind"] == "script" else ref.load_from(path)

    args = map_refs(payload["args"], open_ref)
    if payload["kind"] == "script":
        _run_script(payload, args)
        return None
    function = payload["function"]
    sys.argv = [payload["name"]]
    if getattr(function, "__module__", None) == "__main__":
        # Classes of the caller's __main__ are found where pickle and multiprocessing look for them.
        for name, value in getattr(function, "__globals__", {}).items():
            sys.modules["__main__"].__dict__.setdefault(name, value)
    return function(*args, **map_refs(payload["kwargs"], open_ref))


def _run_script(payload: dict[str, Any], args: tuple[object, ...]) -> None:
    path = _place_script(payload)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [path, *(str(argument) for argument in args)]
    sys.path.insert(0, os.path.dirname(path))
    try:
        exec(compile(payload["source"], path, "exec"), module.__dict__)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def _place_script(payload: dict[str, Any]) -> str:
    """The script's own path where it exists unchanged, so that files beside it are found; else a copy."""
    with contextlib.suppress(OSError), open(payload["path"], "rb") as file:
        if file.read() == payload["source"]:
            return str(payload["path"])
    copy = os.path.join(os.environ["RANKZERO_SCRATCH"], os.path.basename(payload["path"]))
    temporary = f"{copy}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(payload["source"])
    os.replace(temporary, copy)
    return copy


def _commit(value: object, start: Message) -> Message:
    """The record of success; rank 0's carries the value or names the file that holds it."""
    commit: Message = {"type": "commit", "time": time.time()}
    if start["context"]["rank"] != 0:
        return commit
    from rankzero.values import formats

    file_format = formats.choose(value)
    path = os.path.join(start["result_directory"], f".committing-{os.getpid()}.{file_format}")
    try:
        size, sha256 = formats.write(value, file_format, path)
    except OSError as error:
        raise ResultError(f"rank 0 returned, but its value could not be written: {error}") from error
    result = {"format": file_format, "size": size, "sha256": sha256, "path": path}
    result["summary"] = formats.summarize(value)
    if file_format == formats.JSON and size <= INLINE_LIMIT:
        result["value"] = value
    return {**commit, "result": result}


def describe_failure(error: BaseException) -> Message:
    """Facts about an exception: what crosses to the caller instead of the object."""
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    exit_code = _FAILED
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else _FAILED
    return {
        "type": "failure",
        "time": time.time(),
        "exception_type": name,
        "message": _text_of(error),
        "traceback": _user_traceback(error),
        "exit_code": exit_code & 0xFF or _FAILED,
        "collateral": _is_collateral(error),
        "retryable": isinstance(error, RetryableError),
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MESSAGE_LIMIT]
    except Exception as broken:
        return f"(its text cannot be had: {type(broken).__name__})"


def _no_torch(error: ImportError) -> Message:
    version = ".".join(map(str, sys.version_info[:3]))
    message = (
        f"torch cannot be imported by {sys.executable} (Python {version}) on "
        f"{socket.gethostname()}: {error}. Install torch there, or point spark.pyspark.python to a "
        "Python that has it"
    )
    return {**describe_failure(error), "message": message, "cause": "no-torch"}


def _user_traceback(error: BaseException) -> str:
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame))
    return text[-TRACEBACK_LIMIT:]


def _is_collateral(error: BaseException) -> bool:
    """True for what a rank sees when another one vanished: a broken collective."""
    dist = sys.modules.get("torch.distributed")
    broken = getattr(dist, "DistError", None)
    if broken and isinstance(error, broken):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )


def _run_exit_handlers() -> None:
    """What a normal exit would run, within a bound: the value is safe already."""
    timer = threading.Timer(EXIT_HANDLERS_TIMEOUT, os._exit, (0,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(BaseException):
        # Ends idle executor threads, which wait for exactly this, and joins non-daemon ones.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
