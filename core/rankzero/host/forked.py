"""Forks a process that behaves as if it had been started: `subprocess.Popen` without exec.

The forking process has imported torch, which saves each fork the import. Everything else that a fork inherits by
accident is reset here: descriptors, signals, session, environment, working directory. Before user code runs, state of
the interpreter and the libraries is reset, too (`forget`).
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

from rankzero.host.processes import SIGNALS, die_with_parent, getsignal, set_signal_mask, settle_signals

ROOM = "RANKZERO_ROOM"
"""Environment variable that reserves space in a warm server's environment, where its forks show theirs."""

_zips: dict[str, object] = {}
"""Fingerprints of the archives on the search path at the time that their index was read."""

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
    """Forks a child that runs ``main`` in its own session and exits; the kernel kills it when this process dies.

    Args:
        main: The child's main function. SystemExit and other exceptions become the exit code, as in a script.
        title: The child's command line, as process lists show it.
        env: The child's whole environment.
        stdio: Descriptors that become the child's standard input, output and error.
        keep: Descriptors that stay open in the child, under the same numbers.
        surroundings: The child's working ``directory``, ``umask``, resource ``limits`` and ``cores``; None inherits.

    Returns:
        The child's process id.
    """
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        # Else both processes write the buffered text.
        stream.flush()
    # A signal that arrives in the child before its handlers are reset would run the parent's handlers.
    mask = set_signal_mask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; OpenBLAS stops its own for the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        set_signal_mask(signal.SIG_SETMASK, mask)
        return child
    # No object of the parent may be freed here: its files and sockets would close descriptors of this process.
    gc.freeze()
    code = 1
    try:
        os.setsid()
        _take_descriptors(stdio, keep)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            if callable(getsignal(number)):
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
    """Sets only the variables that differ, since every page that a fork writes to is copied."""
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
        # An unprivileged user can only lower them.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), tuple(limit))


def forget() -> None:
    """Resets the state that a started process would not share with others, before user code runs."""
    _forget_search_path()
    compiler: Any = sys.modules.get("torch._dynamo.config")
    if compiler:
        compiler.debug_dir_root = os.path.join(os.getcwd(), "torch_compile_debug")
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    tempfile.tempdir = None
    # Python reseeds its own generator at a fork.
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


def _run_finalizers() -> None:
    # The flag is set when a finalizer is created.
    if _finalize._dirty:
        _finalize._exitfunc()


def prepare() -> None:
    """Prepares this process for its forks, so that each fork has less to reset.

    Records the archives whose index was read, so that forks need not read them again. Drops the cached listings of
    directories, one for each package of torch, which every fork would have to drop.
    """
    importers = _zip_importers()
    for archive in importers.values():
        _zips.setdefault(archive, _fingerprint(archive))
    for place in sys.path_importer_cache.keys() - importers.keys():
        del sys.path_importer_cache[place]
    # Finalizers of the libraries belong to this process, and must not run at the exit of a fork.
    for finalizer in list(getattr(_finalize, "_registry", ())):
        finalizer.atexit = False
    if getattr(_finalize, "_registered_with_atexit", False):
        # A fork walks the finalizers at its exit only if it has created one.
        for handler in (_finalize._exitfunc, _run_finalizers):
            atexit.unregister(handler)
        atexit.register(_run_finalizers)
        _finalize._dirty = False
    # The C library keeps the initial variables in the memory that `_show` overwrites; setting each one moves it.
    for name, value in os.environ.items():
        os.environ[name] = value


def _forget_search_path() -> None:
    """Invalidates the import caches of directories and zips on the search path, except those of unchanged zips.

    Python would read the index of every zip again, which takes 0.1 s for Spark's own.
    """
    unchanged = {}
    for place, archive in _zip_importers().items():
        if archive in _zips and _zips[archive] == _fingerprint(archive) is not None:
            unchanged[place] = sys.path_importer_cache.pop(place)
    importlib.invalidate_caches()
    sys.path_importer_cache.update(unchanged)


def _zip_importers() -> dict[str, str]:
    """Returns the cached entries of the search path that are in a zip, with the path of the zip."""
    found = sys.path_importer_cache.items()
    return {place: finder.archive for place, finder in found if isinstance(finder, zipimport.zipimporter)}


def _fingerprint(archive: str) -> object:
    try:
        found = os.stat(archive)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _show(title: str, env: Mapping[str, str]) -> None:
    """Writes title and environment to the memory that the kernel shows as /proc/PID/cmdline and environ.

    People, and tools that search for the processes of a job, see the same as for a started process. The C library no
    longer uses that memory, since `prepare` has set every variable again.
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


_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg", "/dev/accel")


def touches_gpu() -> bool:
    """Returns True if this process has opened a GPU, which its forks then cannot use."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_DEVICES):
                return True
    return False
