"""Examines an engine: checks this machine, then runs a training whose ranks collect facts about their hosts."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Any

from rankzero import bounds
from rankzero import store as stores
from rankzero.doctor.before import find_problems
from rankzero.doctor.findings import OK, PROBLEM, Finding, judge
from rankzero.doctor.probe import collect_facts
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError
from rankzero.launcher import Launcher
from rankzero.run.handle import RunHandle

REDUCED = 32
"""Megabytes of the tensor that the ranks reduce."""


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
        hang_timeout=bounds.DOCTOR_HANG_TIMEOUT,
        run_id=f"doctor-{secrets.token_hex(4)}",
        labels={"doctor": "1"},
    )
    nonce = secrets.token_hex(8)
    root = stores.normalize(root)
    url = root if stores.is_url(root) else None
    handle: RunHandle[Any] | None = None
    try:
        with launcher.owned(collect_facts, (url, REDUCED, nonce), {}) as handle:
            threading.Thread(target=_call_ranks, args=(handle.directory, nonce), daemon=True).start()
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
    handle.await_driver(bounds.DOCTOR_STORE_TIMEOUT)
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


def _call_ranks(directory: str, nonce: str) -> None:
    """Connects to each rank that reports the address on which it listens."""
    with contextlib.suppress(Exception):
        for event in RunHandle[Any](directory).events(follow=True):
            metrics = event.get("metrics", {})
            if event["type"] == "metric" and "doctor" in metrics:
                for host in [*metrics["doctor"].split(), "127.0.0.1"]:
                    if _call(host, int(metrics["port"]), nonce):
                        break


def _call(host: str, port: int, nonce: str) -> bool:
    try:
        with socket.create_connection((host, port), bounds.DOCTOR_CALL_TIMEOUT) as connection:
            connection.sendall(nonce.encode())
        return True
    except OSError:
        return False
