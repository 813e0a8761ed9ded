"""An examination of an engine: what can be seen from here, then a training that looks around on its ranks."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Any

from rankzero import store as stores
from rankzero.doctor.before import find_problems
from rankzero.doctor.findings import OK, PROBLEM, Finding, judge
from rankzero.doctor.probe import look_around
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError
from rankzero.launcher import DEFAULT_STORE, STORE_VARIABLE, Launcher
from rankzero.run.handle import RunHandle

REDUCED = 32
"""Megabytes of the tensor that the ranks reduce."""

CALL_TIMEOUT = 2.0
"""Seconds for one address of a rank to answer."""

DRIVER_TIMEOUT = 15.0
"""Seconds for the driver of the examination's run to write the rest, before the run is removed."""

HANG_TIMEOUT = 60.0
"""Seconds for ranks that have started to get on with it: somebody waits for them."""


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        findings: In the order in which they were looked at.
        ranks: What each rank has seen; empty if none has started.
        directory: The run directory of ranks that failed while they looked around; else None.
    """

    findings: list[Finding]
    ranks: list[dict[str, Any]]
    directory: str | None = None

    @property
    def healthy(self) -> bool:
        """False if anything would stop a training."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
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
    """Looks for what would stop a training on an engine: from here, then with ranks that look around there.

    Args:
        engine: Where trainings shall run.
        num_processes: Ranks that look around, rounded up to whole tasks; as many as a training will have shows most.
        use_gpu: Give each a GPU.
        processes_per_task: Ranks of one Spark task.
        store: Root of the run directories; None as for `Launcher`.
        start_timeout: Seconds for the ranks to start.

    Example:
        >>> from rankzero import LocalEngine
        >>> examine(LocalEngine()).healthy
        True
    """
    root = store or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    problems = find_problems(engine, root, use_gpu=use_gpu, processes_per_task=processes_per_task)
    if problems:
        return Examination([Finding(PROBLEM, "from here", problem) for problem in problems], [])
    findings = [Finding(OK, "from here", "nothing stands against a training")]
    num_processes = math.ceil(num_processes / processes_per_task) * processes_per_task
    launcher = Launcher(
        num_processes,
        engine=engine,
        use_gpu=use_gpu,
        processes_per_task=processes_per_task,
        store=root,
        start_timeout=start_timeout,
        hang_timeout=HANG_TIMEOUT,
        run_id=f"doctor-{secrets.token_hex(4)}",
        labels={"doctor": "1"},
    )
    nonce = secrets.token_hex(8)
    root = stores.normalize(root)
    url = root if stores.is_url(root) else None
    handle: RunHandle[Any] | None = None
    try:
        with launcher.owned(look_around, (url, REDUCED, nonce), {}) as handle:
            threading.Thread(target=_call_ranks, args=(handle.directory, nonce), daemon=True).start()
            handle.wait()
        ranks: list[dict[str, Any]] = handle.result()
        started = handle.status().started
        findings += judge(ranks, started, use_gpu=use_gpu, store=root)
    except RankZeroError as error:
        failed = Finding(PROBLEM, "a training", f"{type(error).__name__}: {error}", _mend(str(error)))
        return Examination([*findings, failed], [], handle.directory if handle else None)
    finally:
        if url:
            with contextlib.suppress(Exception):
                for rank in range(num_processes):
                    stores.remove(f"{url}/.doctor-{nonce}-{rank}")
    # An examination leaves no run. Its driver, which writes the report last, would write it into the removed directory.
    handle.await_driver(DRIVER_TIMEOUT)
    with contextlib.suppress(Exception):
        stores.remove(handle.directory)
    return Examination(findings, ranks)


_MENDING = {
    "no driver was found": "executors must reach the driver by TCP: open ports= to them, or set spark.driver.host to "
    "an address that they know",
    "No module named 'torch'": "install torch for the Python of the executors (spark.pyspark.python), or ship it with "
    "spark.archives",
    "different Python minor": "set spark.pyspark.python to a Python of this minor version",
    "task slots": "add executors or cores, or examine fewer ranks (-n)",
}


def _mend(error: str) -> str:
    return next((mend for sign, mend in _MENDING.items() if sign in error), "")


def _call_ranks(directory: str, nonce: str) -> None:
    """Connects to each rank that says where it listens."""
    with contextlib.suppress(Exception):
        for event in RunHandle[Any](directory).events(follow=True):
            metrics = event.get("metrics", {})
            if event["type"] == "metric" and "doctor" in metrics:
                for host in [*metrics["doctor"].split(), "127.0.0.1"]:
                    if _call(host, int(metrics["port"]), nonce):
                        break


def _call(host: str, port: int, nonce: str) -> bool:
    try:
        with socket.create_connection((host, port), CALL_TIMEOUT) as connection:
            connection.sendall(nonce.encode())
        return True
    except OSError:
        return False
