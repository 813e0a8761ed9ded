"""Decoded row groups: Arrow files in the scratch directories of tasks, decoded once for all tasks of a host.

Tasks share a file by hard links, and every task removes its own scratch directory. A file therefore exists as long as
one of its tasks, and a task that is killed leaves no duty to another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankzero import bounds

SPARE = 2 << 30
"""Bytes that decoded rows leave free on the disk of the scratch directory; of a tmpfs at least half."""


def place(path: str, decode: Callable[[], Any]) -> Any:
    """Writes a decoded group to a path, unless it exists there or can be linked from another task's directory.

    Args:
        path: A path in the scratch directory of this task; its name identifies the content.
        decode: Returns the group as a record batch.

    Returns:
        None if the file exists now; the record batch if the disk has no room for it.
    """
    if os.path.exists(path):
        return None
    with _locked(path):
        if os.path.exists(path) or _link(path, _is_whole):
            return None
        batch = decode()
        return None if _write(path, batch) else batch


def _write(path: str, batch: Any) -> bool:
    """Writes a group atomically; returns False if the disk has no room."""
    import pyarrow as pa

    directory = os.path.dirname(path)
    room = shutil.disk_usage(directory)
    spare = max(SPARE, room.total // 2) if _is_memory(directory) else SPARE
    if room.free < batch.nbytes + spare:
        return False
    writing = f"{path}.{threading.get_native_id()}.writing"
    try:
        with pa.OSFile(writing, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        os.replace(writing, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        return False
    return True


@functools.cache
def _is_memory(directory: str) -> bool:
    """Returns True for a directory of a tmpfs, whose files are memory of this host or container."""
    device = os.stat(directory).st_dev
    mount = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        return any(line.split()[2] == mount and " - tmpfs " in line for line in mounts)
    return False


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Runs the block on one rank at a time of all tasks that link the same lock file, or after a time-out."""
    name = f"{path}.lock"
    if not os.path.exists(name):
        # Two tasks that come here at the same moment create a lock file each, and both decode.
        _link(name, os.path.exists)
    end = time.monotonic() + bounds.DECODE_LOCK_TIMEOUT
    with open(name, "ab") as lock:
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(bounds.POLL_INTERVAL_BRIEF)
            except OSError:
                # The file system has no locks: ranks that need the group at the same time all decode it.
                break
        try:
            yield
        finally:
            # Unlocked explicitly: a process that was forked meanwhile shares the lock as long as it lives.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _link(path: str, is_good: Callable[[str], bool]) -> bool:
    """Links a good file of the same name from another task of this user and host; returns False if there is none."""
    scratch, name = os.path.split(path)
    for other in glob.glob(os.path.join(glob.escape(os.path.dirname(scratch)), "rankzero-*", name)):
        # Opened by a descriptor and without following links, which other users can create in a shared directory.
        with contextlib.suppress(OSError):
            directory = os.open(os.path.dirname(other), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.geteuid() and is_good(other):
                    os.link(name, path, src_dir_fd=directory)
                    return True
            finally:
                os.close(directory)
    return False


def _is_whole(path: str) -> bool:
    """Returns False for a file without content, which a power failure of the host can leave behind."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as file:
            return bool(pa.ipc.open_file(file).num_record_batches)
    except (OSError, ValueError):
        return False
