"""Decoded groups of rows: Arrow files in the scratch directories of tasks, each made once for those beside each other.

Every task removes its directory, whatever it is linked to; so nobody owns a file, and who dies owes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SPARE = 2 << 30
"""Bytes that decoded rows leave free on the disk of the scratch directory."""

PATIENCE = 120.0
"""Seconds for which a group that another rank decodes is waited for; then it is decoded here, too."""

_LOOK = 0.02
"""Seconds between two looks whether it is."""


def place(path: str, decode: Callable[[], Any]) -> Any:
    """Puts a group at a path, unless it is there, or at another task's.

    Args:
        path: In the scratch directory of this task; its name is that of the content.
        decode: Makes it, as a record batch.

    Returns:
        None; the record batch if the disk has no room for it.
    """
    if os.path.exists(path):
        return None
    with _locked(path):
        if os.path.exists(path) or _link(path, _is_whole):
            return None
        batch = decode()
        return None if _write(path, batch) else batch


def _write(path: str, batch: Any) -> bool:
    """Leaves a group for the other ranks; False if there is no room."""
    import pyarrow as pa

    if shutil.disk_usage(os.path.dirname(path)).free < batch.nbytes + SPARE:
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


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """One rank at a time, of all tasks that have linked the same lock, or for which `PATIENCE` has passed."""
    name = f"{path}.lock"
    if not os.path.exists(name):
        # Two tasks that are here at the very same time have a lock each, and both decode.
        _link(name, os.path.exists)
    end = time.monotonic() + PATIENCE
    with open(name, "ab") as lock:
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK)
            except OSError:
                # A file system that knows no locks: who needs a group at the same time decodes it, too.
                break
        try:
            yield
        finally:
            # A process that was forked meanwhile has the same lock, and may keep it for its life.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _link(path: str, is_good: Callable[[str], bool]) -> bool:
    """Whether another task here has a good file of this name: then it is this task's, too, whoever ends first."""
    scratch, name = os.path.split(path)
    for other in glob.glob(os.path.join(glob.escape(os.path.dirname(scratch)), "rankzero-*", name)):
        # By a descriptor and through no link, which other users may make in a shared place.
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
    """False for a file that has lost its content: what a killed task has left may have outlived its host's power."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as file:
            return bool(pa.ipc.open_file(file).num_record_batches)
    except (OSError, ValueError):
        return False
