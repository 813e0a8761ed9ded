"""Forks a process that behaves as if it had been started: `subprocess.Popen` without exec.

The forking process has imported torch, which saves each fork the import. Everything else that a fork inherits by
accident is reset here: descriptors, signals, session, environment, working directory. Before user code runs, state of
the interpreter and the libraries is reset, too (`forget`).
"""

from __future__ import annotations

import contextlib
import gc
import os
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

from rankzero.host.processes import SIGNALS, end_with_parent, getsignal, set_signal_mask, settle_signals

_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def fork(
    main: Callable[[], object],
    *,
    env: Mapping[str, str],
    stdio: tuple[int, int, int],
    keep: Sequence[int] = (),
    on_parent_death: signal.Signals = signal.SIGKILL,
) -> int:
    """Forks a child that runs ``main`` in its own session and exits.

    Args:
        main: The child's main function. SystemExit and other exceptions become the exit code, as in a script.
        env: The child's whole environment.
        stdio: Descriptors that become the child's standard input, output and error.
        keep: Descriptors that stay open in the child, under the same numbers.
        on_parent_death: The signal that the kernel sends to the child when this process dies.

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
        end_with_parent(parent, on_parent_death)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            if callable(getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        settle_signals()
        _set_environment(env)
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


def forget() -> None:
    """Resets the state that a started process would not share with others, before user code runs."""
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


def prepare() -> None:
    """Prepares this process for its forks, so that each fork has less to reset.

    Drops the cached listings of directories, which may change. Those of archives stay: an archive that has changed
    needs another zygote. Finalizers of the libraries belong to this process, and must not run at the exit of a fork.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if not isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[place]
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg", "/dev/accel")


def touches_gpu() -> bool:
    """Returns True if this process has opened a GPU, which its forks then cannot use."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_DEVICES):
                return True
    return False
