"""Forks of this process, with or without its knowledge.

`fork` makes a process that behaves as if it had been started: `subprocess.Popen` without exec, so that nothing is
imported again. Everything else that a fork inherits by accident is reset there: descriptors, signals, session,
environment, working directory. Before user code runs, `forget` resets the state of the interpreter and the libraries.

The forks of user code, such as the processes of a ``DataLoader``, wait until no other thread of rankzero is in an
import or in a request to an object store (`held`). A child has only the thread that forked: a lock that another thread
held is never released in it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
import zipimport
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from rankzero import bounds
from rankzero.host.processes import SIGNALS, end_with_parent, settle_signals

FORK_TIMEOUT = bounds.scaled(30.0)  # For which a fork waits for imports and requests to a store of rankzero's threads


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
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; OpenBLAS stops its own for the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child
    # No object of the parent may be freed here: its files and sockets would close descriptors of this process.
    gc.freeze()
    code = 1
    try:
        os.setsid()
        _take_descriptors(stdio, keep)
        end_with_parent(parent, on_parent_death)
        settle_signals()
        set_environment(env)
        main()
        code = 0
    except BaseException as error:
        code = exit_code(error)
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """Exits this process after its last output, without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an exception that ends a process, and prints what Python would print."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif error.code is None or isinstance(error.code, int):
        return error.code or 0
    else:
        sys.stderr.write(f"{error.code}\n")
    return 1


def _take_descriptors(stdio: tuple[int, int, int], keep: Sequence[int]) -> None:
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    kept = {0, 1, 2, *keep}
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            # The listing's own descriptor is closed already.
            with contextlib.suppress(OSError):
                os.close(int(name))


def set_environment(env: Mapping[str, str]) -> None:
    """Makes ``env`` the environment, by the variables that differ: every page that a fork writes to is copied."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def forget() -> None:
    """Resets the state that a started process would not share with others, before user code runs."""
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
    needs another zygote. Finalizers of the libraries belong to this process, and run in no fork.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if not isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[place]
    getattr(weakref.finalize, "_registry", {}).clear()


_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg", "/dev/accel")


def touches_gpu() -> bool:
    """Returns True if this process has opened a GPU, which its forks then cannot use."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/dev/fd/{name}").startswith(_GPU_DEVICES):
                return True
    return False


# Re-entrant, since a signal handler of the thread that has it may report, too. `with _lock`, and not `with _changed`: a
# handler's exception inside Condition.__enter__ leaves the lock held.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_holds: Counter[int] = Counter()
"""Number of `held` blocks that each thread is in, by the thread's identifier."""

_forking = 0
"""Number of threads that are about to fork."""

_is_unsafe = False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Runs the block while no other thread forks: a fork waits for its end, at most `FORK_TIMEOUT` seconds."""
    thread = threading.get_ident()
    before = _holds[thread]
    try:
        _enter(thread, before + 1)
        yield
    finally:
        _leave(thread, before)


def pause(settle: Callable[[], object]) -> None:
    """Lets a fork that waits for this thread happen, in the middle of a `held` block.

    Args:
        settle: Ends what must not be in flight at a fork. It is called only if a fork waits.
    """
    thread = threading.get_ident()
    if _forking and (count := _holds[thread]):
        settle()
        _leave(thread, 0)
        _enter(thread, count)


def check() -> None:
    """Raises RuntimeError in a child whose fork did not wait long enough, where a new client would block."""
    if _is_unsafe:
        raise RuntimeError(
            f"process {os.getpid()} was forked while a request to an object store was in flight, which the fork "
            f"awaited for {FORK_TIMEOUT():g} s: its own requests would block. Fork later, or use no processes"
        )


def _enter(thread: int, count: int) -> None:
    with _lock:
        # A thread that a fork waits for, in an outer block, must not wait for the fork.
        _changed.wait_for(lambda: not _forking or _holds[thread])
        _holds[thread] = count


def _leave(thread: int, count: int) -> None:
    with _lock:
        _holds[thread] = count
        if not count:
            del _holds[thread]
        _changed.notify_all()


def _before() -> None:
    global _forking
    with _lock:
        _forking += 1
        _changed.wait_for(lambda: not _holds.keys() - {threading.get_ident()}, FORK_TIMEOUT())


def _after_in_parent() -> None:
    global _forking
    with _lock:
        # CPython only prints the exception of a signal handler in `_before`.
        _forking = max(0, _forking - 1)
        _changed.notify_all()


def _after_in_child() -> None:
    global _lock, _changed, _forking, _is_unsafe
    others = _holds.keys() - {threading.get_ident()}
    for thread in others:
        del _holds[thread]
    _is_unsafe = _is_unsafe or bool(others)
    _lock, _forking = threading.RLock(), 0
    _changed = threading.Condition(_lock)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
