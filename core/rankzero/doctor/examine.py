"""Examines an engine: checks this machine, then runs a training whose ranks collect facts about their hosts."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rankzero import bounds
from rankzero import store as stores
from rankzero.doctor.findings import OK, PROBLEM, Finding, judge
from rankzero.doctor.probe import collect_facts
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError
from rankzero.job import Job, new_run_id
from rankzero.launcher import Launcher
from rankzero.run.handle import RunHandle

DOCTOR_CONNECT_TIMEOUT = bounds.scaled(3.0)  # For one address of a Spark master to resolve and to accept a connection
DOCTOR_STORE_TIMEOUT = bounds.stretched(15.0)  # For a store, whose client may retry for minutes, to take an object
DOCTOR_HANG_TIMEOUT = bounds.scaled(60.0)  # Without progress after which the ranks hang; short, since a user waits

_HTTPS_PORT, _HTTP_PORT = 443, 80


@dataclass(frozen=True)
class Examination:
    """The findings of an examination, and the facts behind them.

    Attributes:
        findings: The findings, in the order of the checks.
        ranks: The facts that each rank has collected; empty if no rank has started.
        directory: The run directory if the ranks failed while they collected facts; else None.
    """

    findings: list[Finding]
    ranks: list[dict[str, Any]]
    directory: str | None = None

    @property
    def healthy(self) -> bool:
        """Returns False if a problem would stop a training."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the examination as plain JSON values."""
        return {"healthy": self.healthy, **asdict(self)}


def examine(
    engine: Engine,
    *,
    num_processes: int = 2,
    use_gpu: bool = False,
    processes_per_task: int = 1,
    store: str | None = None,
    start_timeout: float = 120.0,
) -> Examination:
    """Finds the problems that would stop a training on an engine: on this machine, then with ranks on the engine.

    Args:
        engine: The engine to examine.
        num_processes: Number of ranks, rounded up to whole tasks; use as many as the trainings have.
        use_gpu: Whether each rank gets a GPU.
        processes_per_task: Ranks of one Spark task.
        store: Root of the run directories; None as for `Launcher`.
        start_timeout: Seconds for the ranks to start.

    Example:
        >>> from rankzero import LocalEngine
        >>> examine(LocalEngine()).healthy
        True
    """
    root = stores.root_of(store)
    problems = find_problems(engine, root, use_gpu=use_gpu, processes_per_task=processes_per_task)
    if problems:
        return Examination([Finding(PROBLEM, "from here", problem) for problem in problems], [])
    findings = [Finding(OK, "from here", "no problem found")]
    num_processes = math.ceil(num_processes / processes_per_task) * processes_per_task
    launcher = Launcher(
        num_processes,
        engine=engine,
        use_gpu=use_gpu,
        processes_per_task=processes_per_task,
        store=root,
        start_timeout=start_timeout,
        hang_timeout=DOCTOR_HANG_TIMEOUT(),
        run_id=f"doctor-{secrets.token_hex(4)}",
        labels={"doctor": "1"},
    )
    nonce = secrets.token_hex(8)
    root = stores.normalize(root)
    url = root if stores.is_url(root) else None
    handle: RunHandle[Any] | None = None
    try:
        with launcher.owned(collect_facts, (url, nonce), {}) as handle:
            handle.wait()
        ranks: list[dict[str, Any]] = handle.result()
        started = handle.status().started
        findings += judge(ranks, started, use_gpu=use_gpu, store=root)
    except RankZeroError as error:
        failed = Finding(PROBLEM, "a training", f"{type(error).__name__}: {error}", _fix_of(str(error)))
        return Examination([*findings, failed], [], handle.directory if handle else None)
    finally:
        if url:
            with contextlib.suppress(Exception):
                for rank in range(num_processes):
                    stores.remove(f"{url}/.doctor-{nonce}-{rank}")
    # An examination removes its run. The driver must have written the report before, or would write it again.
    handle.await_driver(DOCTOR_STORE_TIMEOUT())
    with contextlib.suppress(Exception):
        stores.remove(handle.directory)
    return Examination(findings, ranks)


_FIXES = {
    "no driver was found": "executors must reach the driver by TCP: open ports= to them, or set spark.driver.host to "
    "an address that they can reach",
    "No module named 'torch'": "install torch for the Python of the executors (spark.pyspark.python), or ship it with "
    "spark.archives",
    "different Python minor": "set spark.pyspark.python to a Python of this minor version",
    "task slots": "add executors or cores, or examine fewer ranks (-n)",
}


def _fix_of(error: str) -> str:
    return next((fix for text, fix in _FIXES.items() if text in error), "")


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
                start_timeout=DOCTOR_CONNECT_TIMEOUT(),
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
            _within(DOCTOR_CONNECT_TIMEOUT(), functools.partial(_connect, host, port))
            # A cluster with several masters needs only one of them.
            return None
        except TimeoutError:
            reasons.append(f"{host}:{port} did not answer within {DOCTOR_CONNECT_TIMEOUT():g} s")
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
    socket.create_connection((host, port), timeout=DOCTOR_CONNECT_TIMEOUT()).close()


def _check_store(root: str) -> str | None:
    try:
        location = stores.normalize(root)
        if stores.is_url(location):
            _within(DOCTOR_STORE_TIMEOUT(), functools.partial(stores.prove, location))
        else:
            _check_directory(location)
    except TimeoutError:
        bound = DOCTOR_STORE_TIMEOUT()
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
