"""`collect_facts`: a training function that collects facts about each rank's host, its peers and the store.

The module runs on executors, so it imports only the standard library, torch and `rankzero.train`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Any

ROUNDS = 3
"""Number of timed all-reduces, of which the fastest counts."""


REDUCED = 32
"""Megabytes of the tensor that the ranks reduce."""


def collect_facts(store_url: str | None, nonce: str) -> list[dict[str, Any]]:
    """Returns the facts of every rank, in the order of ranks.

    Args:
        store_url: URL of the store's root, for an object store.
        nonce: Part of the names of written files.
    """
    import torch

    import rankzero.train as rt

    entered = time.time()
    context = rt.get_context()
    facts: dict[str, Any] = {
        "rank": context.rank,
        "host": socket.gethostname(),
        "entered": entered,
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "gpus": _gpus(torch),
        "nccl": _nccl(torch),
    }
    problem: str | None = None
    try:
        device: Any = context.device
    except RuntimeError as error:
        problem, device = str(error), None
    facts["device_problem"] = problem
    rt.barrier()
    facts["together"] = time.time()
    facts["store"] = _use_store(context.storage_path, store_url, nonce, context.rank)
    if device is not None and context.world_size > 1:
        facts["bandwidth"] = _reduce(torch, device)
    return rt.all_gather_object(facts)


def _gpus(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _nccl(torch: Any) -> str | None:
    with contextlib.suppress(Exception):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def _reduce(torch: Any, device: Any) -> float:
    """Returns the speed of an all-reduce in megabytes per second, the best of `ROUNDS`."""
    import torch.distributed as dist

    tensor = torch.ones(REDUCED << 18, device=device)
    seconds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return REDUCED / min(seconds[1:])


def _use_store(directory: str | None, url: str | None, nonce: str, rank: int) -> dict[str, Any]:
    """Tests which operations on the store this rank can do: exclusive creation, replace and read."""
    try:
        if directory is not None:
            return _use_directory(os.path.join(directory, f".doctor-{nonce}-{rank}"))
        if url is not None:
            return _use_object(f"{url}/.doctor-{nonce}-{rank}")
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"reached": False}


def _use_directory(path: str) -> dict[str, Any]:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with open(f"{path}-new", "wb") as file:
        file.write(b"two")
    os.replace(f"{path}-new", path)
    with open(path, "rb") as file:
        read = file.read()
    os.unlink(path)
    return {"reached": True, "problem": None if read == b"two" else f"what was replaced reads as {read!r}"}


def _use_object(url: str) -> dict[str, Any]:
    from rankzero.store import remote

    problem = "neither pyarrow nor fsspec with a client of this store is installed"
    for client in remote.clients(url):
        try:
            with client.open_write(url) as file:
                file.write(b"two")
            with client.open_read(url) as file:
                return {"reached": file.read() == b"two"}
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return {"reached": False, "why": problem}
