"""GPUs of this machine: which there are, and which of them no other run of this machine holds."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from rankzero.errors import InsufficientSlotsError

logger = logging.getLogger(__name__)

LISTING_TIMEOUT = 60.0
"""Seconds for ``nvidia-smi``, or for torch in an interpreter of its own, to list the GPUs."""

CLAIMS = "/tmp/rankzero-gpus"
"""A file for each GPU of this machine; whoever holds its lock has the GPU. One place for all users, whatever their
``TMPDIR`` is."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that limit the GPUs of a process: of NVIDIA's and AMD's driver, of AMD's, of Intel's."""

DEVICES = ("/dev/kfd", "/dev/dri", "/dev/dxg")
"""Where the GPUs of AMD and Intel are on Linux: without any of them torch is not asked, which takes seconds."""

# In an interpreter of its own: the driver of a GPU stays in the process that asked it.
_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"


def local_gpus() -> list[str]:
    """Ids of the GPUs this process may use: what a variable of `VISIBLE` lists, else the driver, else torch."""
    for name in VISIBLE:
        if (visible := os.environ.get(name)) is not None:
            # As CUDA reads it: nothing counts after the first that is no device.
            listed = [gpu.strip() for gpu in visible.split(",")]
            return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), listed))
    if shutil.which("nvidia-smi"):
        return _output("nvidia-smi", "--query-gpu=index", "--format=csv,noheader").split()
    may_be_there = sys.platform != "linux" or any(map(os.path.exists, DEVICES))
    return [str(index) for index in range(_counted_by_torch(_COUNT) if may_be_there else 0)]


@functools.cache
def _counted_by_torch(program: str) -> int:
    count = _output(sys.executable, "-c", program).strip()
    return int(count) if count.isdecimal() else 0


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def require_local_gpus(needed: int) -> None:
    """Raises InsufficientSlotsError unless this machine offers so many GPUs."""
    gpus = local_gpus()
    if len(gpus) < needed:
        limits = " ".join(f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ)
        raise InsufficientSlotsError(
            f"use_gpu=True needs {needed} GPUs, one for each rank, but this machine offers "
            f"{len(gpus)} ({', '.join(gpus) or 'neither nvidia-smi nor torch lists any'}; {limits or 'none hidden'}). "
            "Lower num_processes or set use_gpu=False",
            needed=needed,
            available=len(gpus),
        )


class GpuClaims:
    """The GPUs that one run of this machine holds; they are free again when its driver ends, however it ends."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def held(self) -> list[str]:
        """Ids of the GPUs that this run holds."""
        return list(self._held)

    def free(self, gpus: Sequence[str]) -> list[str]:
        """Those of the GPUs that this run holds, or that nobody does."""
        found = []
        for gpu in gpus:
            lock = None if gpu in self._held else _lock(gpu)
            if gpu in self._held or lock is not None:
                found.append(gpu)
            if lock is not None:
                _unlock(lock)
        return found

    def take(self, gpus: Sequence[str], count: int) -> bool:
        """Holds so many of the GPUs, and no other; False, and none, if there are not as many."""
        self.release()
        for gpu in gpus:
            if len(self._held) == count:
                break
            if (lock := _lock(gpu)) is not None:
                self._held[gpu] = lock
        if len(self._held) < count:
            self.release()
        return len(self._held) == count

    def release(self) -> None:
        """Gives all of them back."""
        for lock in self._held.values():
            _unlock(lock)
        self._held.clear()


def _lock(gpu: str) -> int | None:
    """A descriptor that holds the GPU; None if another run does."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(CLAIMS)
            os.chmod(CLAIMS, 0o1777)
        lock = _open_claim(os.path.join(CLAIMS, hashlib.sha256(gpu.encode()).hexdigest()[:16]))
    except OSError as error:
        # Better two runs on one GPU than none.
        logger.warning("cannot see whether another run holds GPU %s: %s", gpu, error)
        return os.open(os.devnull, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _open_claim(path: str) -> int:
    """The file of a GPU. Another user's can be opened and locked; `O_CREAT` would be refused (protected_regular)."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with contextlib.suppress(FileExistsError):
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        os.fchmod(lock, 0o644)
        return lock
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _unlock(lock: int) -> None:
    # Not only closed: a child that was forked meanwhile has the descriptor, too.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
