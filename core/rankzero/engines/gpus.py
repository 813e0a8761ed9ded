"""GPUs of this machine: which exist, and which no other run of this machine uses."""

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

from rankzero import bounds
from rankzero.errors import InsufficientSlotsError

GPU_LISTING_TIMEOUT = bounds.stretched(60.0)  # For nvidia-smi, or torch in its own interpreter, to list the GPUs

logger = logging.getLogger(__name__)

CLAIMS = "/tmp/rankzero-gpus"
"""Directory with a lock file for each GPU of this machine; the process that holds the lock has the GPU. All users share
it, whatever their ``TMPDIR`` is."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that limit the GPUs of a process, by NVIDIA's and AMD's driver, by AMD's, and by Intel's."""

DEVICES = ("/dev/kfd", "/dev/dri", "/dev/dxg")
"""Device files of AMD's and Intel's GPUs on Linux. Without any of them torch is not loaded to count, which takes
seconds."""

# Runs in an interpreter of its own, because the driver of a GPU stays loaded in the process that queries it.
_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"


def local_gpus() -> list[str]:
    """Returns ids of the GPUs this process may use: from a variable of `VISIBLE`, else the driver, else torch."""
    for name in VISIBLE:
        if (visible := os.environ.get(name)) is not None:
            # CUDA ignores everything after the first entry that is no device.
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_LISTING_TIMEOUT())
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def require_local_gpus(needed: int) -> None:
    """Raises InsufficientSlotsError unless this machine has this many GPUs."""
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
    """The GPUs that one run of this machine has locked; they are free again when its driver ends, however it ends."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def held(self) -> list[str]:
        """Ids of the GPUs that this run has locked."""
        return list(self._held)

    def free(self, gpus: Sequence[str]) -> list[str]:
        """Returns those of the GPUs that no other run has locked."""
        found = []
        for gpu in gpus:
            lock = None if gpu in self._held else _lock(gpu, fcntl.LOCK_SH)
            if gpu in self._held or lock is not None:
                found.append(gpu)
            if lock is not None:
                _unlock(lock)
        return found

    def take(self, gpus: Sequence[str], count: int) -> bool:
        """Locks exactly this many of the GPUs; returns False, and locks none, if fewer are free."""
        self.release()
        for gpu in gpus:
            if len(self._held) == count:
                break
            if (lock := _lock(gpu, fcntl.LOCK_EX)) is not None:
                self._held[gpu] = lock
        if len(self._held) < count:
            self.release()
        return len(self._held) == count

    def release(self) -> None:
        """Unlocks all GPUs of this run."""
        for lock in self._held.values():
            _unlock(lock)
        self._held.clear()


def _lock(gpu: str, kind: int) -> int | None:
    """Returns a descriptor that locks the GPU; None if another run has locked it.

    Args:
        gpu: Id of the GPU.
        kind: ``LOCK_EX`` to have it; ``LOCK_SH`` only to find out whether another run has it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(CLAIMS)
            os.chmod(CLAIMS, 0o1777)
        lock = _open_claim(os.path.join(CLAIMS, hashlib.sha256(gpu.encode()).hexdigest()[:16]))
    except OSError as error:
        # Two runs on one GPU are better than none.
        logger.warning("cannot check whether another run uses GPU %s: %s", gpu, error)
        return os.open(os.devnull, os.O_RDONLY)
    while not _locks(lock, kind):
        # An exclusive lock also waits for runs that only find out, which takes them microseconds.
        if kind == fcntl.LOCK_SH or not _locks(lock, fcntl.LOCK_SH):
            os.close(lock)
            return None
    return lock


def _locks(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_claim(path: str) -> int:
    """Opens the lock file of a GPU. `O_CREAT` alone would be refused for another user's file (protected_regular)."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with contextlib.suppress(FileExistsError):
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        os.fchmod(lock, 0o644)
        return lock
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _unlock(lock: int) -> None:
    # Closing is not enough: a child that was forked meanwhile has the descriptor, too.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
