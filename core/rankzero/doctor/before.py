"""Finds the problems that would stop a training on an engine, as sentences, without starting a JVM."""

from __future__ import annotations

import functools
import os
import queue
import re
import socket
import tempfile
import threading
from collections.abc import Callable

from rankzero import bounds, store
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError
from rankzero.job import Job, new_run_id

_HTTPS_PORT, _HTTP_PORT = 443, 80


def find_problems(engine: Engine, root: str, *, use_gpu: bool = False, processes_per_task: int = 1) -> list[str]:
    """Returns the problems that this machine can find, one sentence each; empty if there are none.

    Args:
        engine: The engine of future trainings.
        root: Root of the run directories.
        use_gpu: Whether the trainings use GPUs.
        processes_per_task: Ranks of one Spark task.
    """
    checks = [
        functools.partial(_check_job, engine, use_gpu, processes_per_task),
        functools.partial(_check_master, str(engine.to_spec()[0].get("master") or "")),
        functools.partial(_check_store, root),
    ]
    return [problem for check in checks if (problem := check())]


def _check_job(engine: Engine, use_gpu: bool, processes_per_task: int) -> str | None:
    """Returns why the engine would refuse a run of one Spark task (packages, Java, GPUs, slots, conf); else None."""
    try:
        engine.check(
            Job(
                run_id=new_run_id("test"),
                name="test",
                num_processes=processes_per_task,
                processes_per_task=processes_per_task,
                use_gpu=use_gpu,
                backend=None,
                timeout=None,
                start_timeout=bounds.DOCTOR_CONNECT_TIMEOUT,
                engine=engine.to_spec()[0],
            )
        )
    except RankZeroError as error:
        return str(error)
    return None


def _check_master(master: str) -> str | None:
    addresses = master_addresses(master)
    reasons = []
    for host, port in addresses:
        try:
            _within(bounds.DOCTOR_CONNECT_TIMEOUT, functools.partial(_connect, host, port))
            # A cluster with several masters needs only one of them.
            return None
        except TimeoutError:
            reasons.append(f"{host}:{port} did not answer within {bounds.DOCTOR_CONNECT_TIMEOUT:g} s")
        except OSError as error:
            reasons.append(f"{host}:{port} does not answer ({error})")
    if not reasons:
        return None
    return f"master {master!r} cannot be reached: {', '.join(reasons)}; check host, port and firewall"


def master_addresses(master: str) -> list[tuple[str, int]]:
    """Returns the hosts and ports in a master's URL; none for ``local`` and ``yarn``.

    Example:
        >>> master_addresses("spark://one:7077,[fe80::2]:7077")
        [('one', 7077), ('fe80::2', 7077)]
        >>> master_addresses("k8s://https://api")
        [('api', 443)]
    """
    found = re.fullmatch(r"(?:spark://|k8s://(?:(https?)://)?)([^/]+)/?.*", master)
    if not found:
        return []
    addresses = []
    for part in found[2].split(","):
        address = re.fullmatch(r"(.+?)(?::(\d+))?", part)
        if address:
            default = _HTTP_PORT if found[1] == "http" else _HTTPS_PORT
            addresses.append((address[1].strip("[]"), int(address[2] or default)))
    return addresses


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=bounds.DOCTOR_CONNECT_TIMEOUT).close()


def _check_store(root: str) -> str | None:
    try:
        location = store.normalize(root)
        if store.is_url(location):
            _within(bounds.DOCTOR_STORE_TIMEOUT, functools.partial(store.prove, location))
        else:
            _check_directory(location)
    except TimeoutError:
        bound = bounds.DOCTOR_STORE_TIMEOUT
        return f"store {root!r} did not accept a file within {bound:g} s; check its address and credentials"
    except Exception as error:
        return f"store {root!r} cannot be written ({type(error).__name__}: {error}); check path and rights"
    return None


def _check_directory(path: str) -> None:
    """Raises OSError unless a run can create its directory at a path. Creates no directory itself."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is not a directory")
    with tempfile.TemporaryFile(dir=path):
        pass


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Runs an action that may hang in the system's resolver or a store's client. Raises TimeoutError after a time."""
    answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def act() -> None:
        try:
            action()
        except Exception as error:
            answer.put(error)
        else:
            answer.put(None)

    # A daemon thread, since a resolver that hangs must not keep this process from exiting.
    threading.Thread(target=act, name="rankzero-test", daemon=True).start()
    try:
        error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error:
        raise error
