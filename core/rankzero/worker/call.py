"""The call of the user's code: a function, a script, a module as a script, or a command.

`run_exit_handlers` ends a rank whose code has returned: exit handlers and non-daemon threads, within a time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankzero.channel.messages import Start
from rankzero.host.processes import signal_name
from rankzero.worker.failures import CommandError, install_restart_on

if TYPE_CHECKING:
    from rankzero.values.ref import ResultRef

LOCAL_RANK_MACRO = "${local_rank}"  # Placeholder in the arguments of a script; torchrun has the same


def call(start: Start, fetch: Callable[[str], str], has_worked: Callable[[], bool]) -> object:
    """Loads the payload, opens references and calls the user's code.

    Args:
        start: The agent's message.
        fetch: Makes the agent fetch a file from the driver; returns its local path.
        has_worked: Returns True if this rank has made a process group, reported, set a result, or taken a step of an
            optimizer.

    Returns:
        The value that a function returned; None for other kinds, and after ``sys.exit(0)``, which is a success.
    """
    from rankzero.train.context import RANK_PROCESS
    from rankzero.values.pickled import open_packed
    from rankzero.values.ref import map_refs

    # The caller's own code comes before installed packages, as in the caller's process.
    own = _enter(start.code) if start.code else []
    if start.modules:
        own.append(start.modules)
    sys.path[:0] = own
    # The agent has verified its digest, so it may be unpickled.
    payload = open_packed(start.payload)
    install_restart_on(payload.get("restart_on"))
    is_function = payload["kind"] == "function"

    def open_ref(ref: ResultRef) -> object:
        path = _path_of(ref, start, fetch)
        return ref.load_from(path) if is_function else path

    if payload["kind"] != "command":
        # A command is another program, which may itself be a caller of rankzero.
        os.environ[RANK_PROCESS] = str(os.getpid())
    function = payload.get("function")
    config = getattr(function, "launch_config", None)
    # In one call, so that an object that was given twice is one object here, too.
    given = payload["args"], payload.get("kwargs", {}), config
    args, kwargs, opened = map_refs(given, open_ref) if start.refs else given
    if opened is not config:
        function.launch_config = opened
    try:
        if is_function:
            return _call_function(payload, args, kwargs, len(own))
        line = [str(argument).replace(LOCAL_RANK_MACRO, os.environ["LOCAL_RANK"]) for argument in args]
        if payload["kind"] == "script":
            _run_script(payload, line, len(own))
        elif payload["kind"] == "module":
            sys.argv = [payload["name"], *line]
            runpy.run_module(payload["name"], run_name="__main__", alter_sys=True)
        else:
            run_command(line)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    if payload["kind"] in ("script", "module") and start.context["rank"] == 0 and not has_worked():
        what = "made no process group, reported nothing and set no result"
        # The program may have closed its output.
        with contextlib.suppress(OSError, ValueError):
            print(f"rankzero: the {payload['kind']} {what}: is its training function called?", flush=True)
    return None


def _path_of(ref: ResultRef, start: Start, fetch: Callable[[str], str]) -> str:
    """Returns the local path of a referenced file. Raises ResultError if this host cannot read it.

    A file on an object store is read directly if this worker has a client and the permission; else the driver sends
    it. Either happens once for all workers of a task.
    """
    from rankzero.store import remote

    name, path = start.refs[ref.uri]
    assert name is not None
    if path is not None:
        return path
    if client := remote.find_client(ref.uri):
        # The driver's error is the one to report: it has the credentials that the run was given.
        with contextlib.suppress(Exception):
            return remote.download(client, ref.uri, os.path.join(start.scratch, f"read-{name}"))
    return fetch(name)


def _enter(code: str) -> list[str]:
    """Changes to the user's working directory; returns it and the places of the user's Python files."""
    working_dir, py_files = os.path.join(code, "working_dir"), os.path.join(code, "py_files")
    places = []
    if os.path.isdir(working_dir):
        os.chdir(working_dir)
        places.append(working_dir)
    if os.path.isdir(py_files):
        archives = [name for name in sorted(os.listdir(py_files)) if name.endswith((".zip", ".egg", ".whl"))]
        places += [py_files, *(os.path.join(py_files, name) for name in archives)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    return places


def _call_function(payload: dict[str, Any], args: Any, kwargs: Any, own: int) -> object:
    """Calls the user's function; ``own`` places at the beginning of the search path have code that was sent."""
    function = payload["function"]
    for name in payload["loaded"]:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            # The function may not need this module.
            print(f"rankzero: {name}, which the caller has loaded, cannot be imported here: {error}")
    sys.argv = [payload["name"]]
    if getattr(function, "__module__", None) == "__main__":
        names = dict(getattr(function, "__globals__", {}))
        if not os.path.isfile(file := names.get("__file__", "")):
            names.pop("__file__", None)
        elif not names.get("__package__"):
            # Spawned processes run the caller's script again for its classes, with all that it imports.
            sys.path.insert(own, os.path.dirname(file))
        # pickle and multiprocessing find classes of the caller's __main__ there.
        for name, value in names.items():
            sys.modules["__main__"].__dict__.setdefault(name, value)
    value = function(*args, **kwargs)
    if inspect.iscoroutine(value) or inspect.isasyncgen(value) or inspect.isgenerator(value):
        raise TypeError(
            f"{payload['name']} returned {value!r}, of which nothing has run yet: ranks call plain functions. "
            "For an async one give lambda: asyncio.run(train())"
        )
    return value


def _run_script(payload: dict[str, Any], line: list[str], own: int) -> None:
    """Runs a script in the module ``__main__`` of this process; ``own`` as for a function."""
    path = _place(payload["path"], payload["source"])
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [path, *line]
    sys.path.insert(own, os.path.dirname(path))
    # Not with the future statements of this module.
    exec(compile(payload["source"], path, "exec", dont_inherit=True), module.__dict__)


def _place(path: str, data: bytes) -> str:
    """Returns the file's own path if it exists unchanged, so that code finds files beside it; else that of a copy.

    Args:
        path: Path of the file where it was submitted.
        data: Its content.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == data:
            return path
    folder = os.path.join(os.environ["RANKZERO_SCRATCH"], "sent")
    os.makedirs(folder, exist_ok=True)
    copy = os.path.join(folder, os.path.basename(path))
    temporary = f"{copy}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, copy)
    return copy


def run_command(line: list[str]) -> None:
    """Runs a command to its end. A SIGTERM to the rank is forwarded to the command, which then has the run's grace.

    Raises:
        CommandError: the command was killed by a signal, or exited with a code other than 0.
        OSError: the command cannot be started.
    """
    asked: list[int] = []
    # Before there is a command: the signal may come the moment that it starts, and must not end this rank alone.
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    process = subprocess.Popen(line)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    for number in asked:
        process.send_signal(number)
    code = process.wait()
    if code == 0:
        return
    what = f"the command {shlex.join(line)!r}"
    if code < 0:
        name = signal_name(-code)
        raise CommandError(f"{what} was killed by {name}", {"exit_code": None, "signal": name})
    raise CommandError(f"{what} exited with code {code}", {"exit_code": code, "signal": None, **_recorded()})


def _recorded() -> dict[str, Any]:
    """Returns the exception that ``record`` of ``torch.distributed.elastic`` wrote; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
            message = json.load(file)["message"]
        kind, _, text = str(message["message"]).partition(": ")
        return {"exception_type": kind, "message": text, "traceback": str(message["extraInfo"]["py_callstack"])}
    return {}


def run_exit_handlers(bound: float) -> None:
    """Runs what a normal exit of Python runs; the rank's result is committed already.

    Args:
        bound: Seconds after which this process exits and logs what it cut off.
    """
    timer = threading.Timer(bound, _cut_off, (bound,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(BaseException):
        # Ends idle threads of concurrent.futures, which wait for this call, and joins non-daemon threads.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _cut_off(bound: float) -> None:
    try:
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        names = [f"the thread {thread.name!r}" for thread in threads if thread is not threading.main_thread()]
        # Not by sys.stderr, whose lock the thread that is cut off may hold.
        os.write(2, f"{cut_off_message(bound, ' and '.join(names) or 'an exit handler')}\n".encode(errors="replace"))
        faulthandler.dump_traceback(file=2, all_threads=True)
    finally:
        os._exit(0)


def cut_off_message(bound: float, what: str) -> str:
    """Returns the log line that names what ``exit_timeout`` cut off."""
    return (
        f"rankzero: this rank had returned, and was ended after exit_timeout={bound:g} s, which cut off {what}. "
        "The run's result is safe; a larger exit_timeout lets this finish"
    )
