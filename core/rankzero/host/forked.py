"""A forked process that looks and behaves as if it had been started: what `subprocess.Popen` does, without exec.

The forking process has torch loaded; that is what a fork saves. Everything else that one process could inherit from
another by accident is put right here: descriptors, signals, session, environment, working directory, and, where the
user's code is to run, what the interpreter and the libraries remember (`forget`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import resource
import signal
import sys
import tempfile
import traceback
import types
import warnings
import weakref
import zipimport
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rankzero.host.descendants import die_with_parent
from rankzero.host.processes import settle_signals

ROOM = "RANKZERO_ROOM"
"""Variable that only reserves space in a warm server's environment: its forks show theirs there."""

_zips: dict[str, object] = {}
"""Archives on the search path whose index was read, and what they looked like then."""

_finalize: Any = weakref.finalize

_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def fork(
    main: Callable[[], object],
    *,
    title: str,
    env: Mapping[str, str],
    stdio: tuple[int, int, int],
    keep: Sequence[int] = (),
    surroundings: Mapping[str, Any] | None = None,
) -> int:
    """Forks a child that runs ``main`` in a session of its own and leaves; it dies with this process.

    Args:
        main: What the child does. Its SystemExit and other exceptions become the exit code, as in a script.
        title: The child's command line, for people who look at a process list.
        env: The child's whole environment.
        stdio: Descriptors that become its standard input, output and error.
        keep: Descriptors that stay open in it, under their numbers.
        surroundings: Its working ``directory``, ``umask``, resource ``limits`` and ``cores``; None keeps this one's.

    Returns:
        The child's process id.
    """
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        # Else both write what waits there.
        stream.flush()
    # A signal that comes to the child before it is one would be taken by the parent's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; OpenBLAS stops its own for the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child
    # Nothing of the parent's may be collected here: its files and sockets would close descriptors of ours.
    gc.freeze()
    code = 1
    try:
        os.setsid()
        _take_descriptors(stdio, keep)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        settle_signals()
        if surroundings is not None:
            _move_to(surroundings)
        _set_environment(env)
        with contextlib.suppress(Exception):
            _show(title, env)
        main()
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _take_descriptors(stdio: tuple[int, int, int], keep: Sequence[int]) -> None:
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    kept = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            # The listing's own descriptor is closed already.
            with contextlib.suppress(OSError):
                os.close(int(name))


def _set_environment(env: Mapping[str, str]) -> None:
    """Touches what differs: every page that a fork writes to has to be copied."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _move_to(surroundings: Mapping[str, Any]) -> None:
    os.chdir(surroundings["directory"])
    os.umask(surroundings["umask"])
    os.sched_setaffinity(0, surroundings["cores"])
    for name, limit in surroundings["limits"].items():
        # Lower ones only, unless this user may do more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), tuple(limit))


def forget() -> None:
    """Renews what would be another value in a process that had been started, before the user's code can see it."""
    _forget_search_path()
    compiler: Any = sys.modules.get("torch._dynamo.config")
    if compiler:
        compiler.debug_dir_root = os.path.join(os.getcwd(), "torch_compile_debug")
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    tempfile.tempdir = None
    # Python's own generator seeds itself anew at a fork.
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


def _run_finalizers() -> None:
    # True once there is a new one.
    if _finalize._dirty:
        _finalize._exitfunc()


def prepare() -> None:
    """Readies this process for its forks: they share what is there, and do not go through it one by one.

    Notes which archives it has searched, so that nobody need read their indexes again; drops what is known of
    directories, a listing for each package of torch, which every fork would have to drop.
    """
    importers = _zip_importers()
    for archive in importers.values():
        _zips.setdefault(archive, _look_of(archive))
    for place in sys.path_importer_cache.keys() - importers.keys():
        del sys.path_importer_cache[place]
    # What the libraries would undo at their process's end is not the forks' to undo.
    for finalizer in list(getattr(_finalize, "_registry", ())):
        finalizer.atexit = False
    if getattr(_finalize, "_registered_with_atexit", False):
        # Nor to go through, unless they make one of their own.
        for handler in (_finalize._exitfunc, _run_finalizers):
            atexit.unregister(handler)
        atexit.register(_run_finalizers)
        _finalize._dirty = False
    # The C library keeps variables that were there from the beginning where `_show` writes.
    for name, value in os.environ.items():
        os.environ[name] = value


def _forget_search_path() -> None:
    """A zip or a directory on the search path may have changed since it was looked at.

    Python would read the index of every zip at once: a tenth of a second for Spark's own, of which nothing changed.
    """
    unchanged = {}
    for place, archive in _zip_importers().items():
        if archive in _zips and _zips[archive] == _look_of(archive) is not None:
            unchanged[place] = sys.path_importer_cache.pop(place)
    importlib.invalidate_caches()
    sys.path_importer_cache.update(unchanged)


def _zip_importers() -> dict[str, str]:
    """Places on the search path, and below it, that lie in a zip; and which."""
    found = sys.path_importer_cache.items()
    return {place: finder.archive for place, finder in found if isinstance(finder, zipimport.zipimporter)}


def _look_of(archive: str) -> object:
    try:
        found = os.stat(archive)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _show(title: str, env: Mapping[str, str]) -> None:
    """Writes title and environment to where the kernel shows them: /proc/PID/cmdline and environ.

    People, and tools that look for the processes of a job, see what they would see of a started process. The C
    library does not use that memory any more: `prepare` set every variable anew.
    """
    import ctypes

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    # proc(5): fields 48 to 51 of the line, whose third is the first after the parenthesis.
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    for start, end, text in ((arg_start, arg_end, os.fsencode(title)), (env_start, env_end, variables)):
        room = end - start
        if start and room > 0:
            ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
