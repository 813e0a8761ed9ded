"""GPUs of this machine: which exist, and which no other run of this machine uses."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import ClassVar

from rankzero import bounds
from rankzero.errors import InsufficientSlotsError

GPU_LISTING_TIMEOUT = bounds.stretched(60.0)  # For nvidia-smi, or torch in its own interpreter, to list the GPUs

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that limit the GPUs of a process, by NVIDIA's and AMD's driver, by AMD's, and by Intel's."""

DEVICES = ("/dev/kfd", "/dev/dri", "/dev/dxg")
"""Device files of AMD's and Intel's GPUs on Linux. Without them torch, which takes seconds, is not loaded to count."""

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
        )


_NAME = "\0rankzero-gpu-"


class GpuClaims:
    """The GPUs that one run of this machine has claimed; they are free again when its driver ends, however it ends.

    A claim is a socket with a name in Linux's abstract namespace, which all users share, and which the kernel frees.
    Elsewhere claims have no effect: two runs on one GPU are better than none.
    """

    _sockets: ClassVar[weakref.WeakSet[socket.socket]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    @property
    def held(self) -> list[str]:
        """Ids of the GPUs that this run has claimed."""
        return list(self._held)

    def free(self, gpus: Sequence[str]) -> list[str]:
        """Returns those of the GPUs that no other run has claimed."""
        return [gpu for gpu in gpus if gpu in self._held or not _is_claimed(gpu)]

    def take(self, gpus: Sequence[str], count: int) -> bool:
        """Claims exactly this many of the GPUs; returns False, and claims none, if fewer are free."""
        self.release()
        for gpu in gpus:
            if len(self._held) < count and (claim := _claimed(gpu)):
                self._held[gpu] = claim
                self._sockets.add(claim)
        if len(self._held) < count:
            self.release()
        return len(self._held) == count

    def release(self) -> None:
        """Frees all GPUs of this run."""
        while self._held:
            self._held.popitem()[1].close()


def _forget() -> None:
    """Closes the sockets of all claims in a forked child, which would keep the GPUs of its parent claimed."""
    for claim in GpuClaims._sockets:
        claim.close()


os.register_at_fork(after_in_child=_forget)


def _is_claimed(gpu: str) -> bool:
    """Returns True if another run has claimed the GPU; finding out disturbs no other run."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.connect(_NAME + gpu)
        return True
    return False


def _claimed(gpu: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(_NAME + gpu)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None
    return claim
