"""Decoded groups of rows: Arrow files in the scratch directories of tasks, each made once for those beside each other.

Every task removes its directory, whatever it is linked to; so nobody owns a file, and who dies owes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

SPARE = 2 << 30
"""Bytes that decoded rows leave free on the disk of the scratch directory."""

PATIENCE = 60.0
"""Seconds for which a group that another task decodes is waited for; then it is decoded here, too."""

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
    with _locked(path):
        if os.path.exists(path) or _linked(path):
            return None
        batch = decode()
        return None if _write(path, batch) else batch


def _write(path: str, batch: Any) -> bool:
    """Leaves a group for the other ranks; False if there is no room."""
    import pyarrow as pa

    if shutil.disk_usage(os.path.dirname(path)).free < batch.nbytes + SPARE:
        return False
    writing = f"{path}.writing"
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
    """One rank of this task at a time."""
    with open(f"{path}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _linked(path: str) -> bool:
    """Whether another task here has decoded a group: its file is this task's, too, whichever of them ends first."""
    scratch, name = os.path.split(path)
    others = os.path.join(glob.escape(os.path.dirname(scratch)), "rankzero-*", f"{name}.lock")
    for lock in sorted(glob.glob(others)):
        with contextlib.suppress(OSError):
            if os.stat(os.path.dirname(lock)).st_uid != os.geteuid():
                continue
            # Nobody waits for those behind it in the alphabet, so no two for each other.
            if lock < path:
                _wait_for(lock)
            os.link(lock.removesuffix(".lock"), path)
            return True
    return False


def _wait_for(lock: str) -> None:
    """Returns when the group of another task has been decoded, its process has ended, or after `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    with open(lock, "rb") as file:
        while time.monotonic() < end:
            try:
                return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK)
