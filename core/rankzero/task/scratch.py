"""Scratch directories of agents and zygotes: each is locked while a process uses it, and removed after it.

Standard library only: this module is pickled by value with `rankzero.task.hold`.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import socket
import tempfile
import time

ABANDONED_AFTER = 60.0  # Seconds since its last change for which a directory may be unlocked: it has just been created

SOCKET_PATH_ROOM = 74  # Most characters of a path below which multiprocessing's sockets (33 of 107) fit
PREFIX = "rankzero-agent-"


def lock_directory(path: str) -> int:
    """Locks a directory for as long as this process lives; returns the descriptor that holds the lock."""
    lock = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def make_scratch(root: str, prefix: str = PREFIX) -> str:
    """Creates a directory of this process, after `remove_abandoned`. Raises OSError."""
    remove_abandoned(root, prefix)
    return tempfile.mkdtemp(prefix=f"{prefix}{_host()}-", dir=root)


def remove_abandoned(root: str, prefix: str = PREFIX) -> None:
    """Removes the directories of processes of this host that were killed: those that no process has locked.

    The lock decides, and no process id, since processes of several containers may share the root. On some file servers
    a lock holds only on its own host, so directories of other hosts stay, by the digits that follow ``prefix``.
    """
    for path in glob.glob(f"{glob.escape(os.path.join(root, prefix))}{_host()}-*"):
        # Directories of other users may be there, too.
        with contextlib.suppress(OSError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(directory).st_mtime > ABANDONED_AFTER:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def scratch_root() -> str:
    """Returns a writable directory: ``TMPDIR``, else Spark's local directory with most free space, else ``/tmp``.

    Raises:
        RuntimeError: no directory is writable.
    """
    spark = os.environ.get("SPARK_LOCAL_DIRS", "")
    set_by_user = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    if writable := list(filter(_is_writable, set_by_user)):
        return writable[0]
    if writable := list(filter(_is_writable, spark.split(","))):
        return max(writable, key=lambda place: shutil.disk_usage(place).free)
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise RuntimeError(
            f"no directory on {socket.gethostname()} can be written (tried TMPDIR, SPARK_LOCAL_DIRS={spark!r}, /tmp, "
            "/var/tmp): mount one, and name it in spark.local.dir or TMPDIR"
        ) from None


def _is_writable(place: str) -> bool:
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def make_temporary(scratch: str) -> str | None:
    """Creates the directory for the ranks' temporary files, removed with the agent; None keeps the system's own."""
    path = os.path.join(scratch, "tmp")
    # Raises if no other directory is writable.
    with contextlib.suppress(FileNotFoundError):
        if len(path) > SOCKET_PATH_ROOM and tempfile.gettempdir():
            return None
    os.mkdir(path)
    return path
