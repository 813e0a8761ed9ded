"""Examines an engine: checks this machine, then runs a training whose ranks collect facts about their hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import socket
import tempfile
from dataclasses import dataclass
from typing import Any

from rankzero import bounds
from rankzero import store as stores
from rankzero.doctor.findings import OK, PROBLEM, Finding, collect_facts, judge
from rankzero.engines.base import Engine
from rankzero.errors import RankZeroError
from rankzero.job import Job, new_run_id
from rankzero.launcher import Launcher, open_run
from rankzero.run.handle import RunHandle
from rankzero.threads import in_thread

DOCTOR_CONNECT_TIMEOUT = bounds.scaled(3.0)  # For one address of a Spark master to accept a connection
DOCTOR_STORE_TIMEOUT = bounds.stretched(15.0)  # For a store, whose client may retry for minutes, to take an object
DOCTOR_HANG_TIMEOUT = bounds.scaled(60.0)  # Without progress after which the ranks hang; short, since a user waits


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

    def __str__(self) -> str:
        """Returns the problems and warnings in one line, or what was found to be right."""
        shown = [finding for finding in self.findings if finding.level != OK] or self.findings
        return "; ".join(f"{one.about}: {one.what}" + (f" ({one.mend})" if one.mend else "") for one in shown)

    @property
    def healthy(self) -> bool:
        """Returns False if a problem would stop a training."""
        return all(finding.level != PROBLEM for finding in self.findings)


def examine(
    engine: Engine,
    *,
    num_processes: int = 2,
    use_gpu: bool = False,
    processes_per_task: int = 1,
    store: str | None = None,
    start_timeout: float = 120.0,
    trains: bool = True,
) -> Examination:
    """Finds the problems that would stop a training on an engine: on this machine, then with ranks on the engine.

    Args:
        engine: The engine to examine.
        num_processes: Number of ranks, rounded up to whole tasks; use as many as the trainings have.
        use_gpu: Whether each rank gets a GPU.
        processes_per_task: Ranks of one Spark task.
        store: Root of the run directories; None as for `Launcher`.
        start_timeout: Seconds for the ranks to start.
        trains: False examines only what this machine can find without ranks.

    Example:
        >>> from rankzero import LocalEngine
        >>> examine(LocalEngine()).healthy
        True
    """
    root = stores.root_of(store)
    if problems := find_problems(engine, root, use_gpu=use_gpu, processes_per_task=processes_per_task):
        return Examination([Finding(PROBLEM, "from here", problem) for problem in problems], [])
    findings = [Finding(OK, "from here", "no problem found")]
    if not trains:
        return Examination(findings, [])
    num_processes += -num_processes % processes_per_task
    launcher = Launcher(num_processes, engine=engine, use_gpu=use_gpu, store=root, labels={"doctor": "1"})
    launcher = launcher.options(start_timeout=bounds.scaled(start_timeout)(), hang_timeout=DOCTOR_HANG_TIMEOUT())
    launcher = launcher.options(processes_per_task=processes_per_task, run_id=f"doctor-{secrets.token_hex(4)}")
    nonce = secrets.token_hex(8)
    root = stores.normalize(root)
    url = root if stores.is_url(root) else None
    handle: RunHandle[Any] | None = None
    try:
        with open_run(launcher, collect_facts, (url, nonce), {}) as handle:
            handle.wait()
        ranks: list[dict[str, Any]] = handle.result()
        findings += judge(ranks, handle.status().started, store=root)
    except RankZeroError as error:
        failed = Finding(PROBLEM, "a training", f"{type(error).__name__}: {error}")
        return Examination([*findings, failed], [], handle.directory if handle else None)
    finally:
        if url:
            with contextlib.suppress(Exception):
                stores.remove(f"{url}/.doctor-{nonce}")
    # An examination removes its run. The driver must have written the report before, or would write it again.
    handle.await_driver(DOCTOR_STORE_TIMEOUT())
    with contextlib.suppress(Exception):
        stores.remove(handle.directory)
    return Examination(findings, ranks)


def find_problems(engine: Engine, root: str, *, use_gpu: bool = False, processes_per_task: int = 1) -> list[str]:
    """Returns the problems that this machine can find, one sentence each; the arguments are those of `examine`."""
    master = str(engine.to_spec()[0].get("master") or "")
    found = [_check_job(engine, use_gpu, processes_per_task), _check_master(master), _check_store(root)]
    return [problem for problem in found if problem]


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
    """Returns why no host of a master ``spark://one:7077,two:7077`` can be reached; None for one and other masters."""
    reasons = []
    for host, port in re.findall(r"[/,]([^/,]+):(\d+)", master) if master.startswith("spark://") else ():
        try:
            connect = functools.partial(socket.create_connection, (host.strip("[]"), int(port)))
            in_thread(connect).result(DOCTOR_CONNECT_TIMEOUT()).close()
            # A cluster with several masters needs only one of them.
            return None
        except OSError as error:
            late = f"did not answer within {DOCTOR_CONNECT_TIMEOUT():g} s" if isinstance(error, TimeoutError) else ""
            reasons.append(f"{host}:{port} {late or f'does not answer ({error})'}")
    what = f"master {master!r} cannot be reached: {', '.join(reasons)}; check host, port and firewall"
    return what if reasons else None


def _check_store(root: str) -> str | None:
    try:
        location = stores.normalize(root)
        if stores.is_url(location):
            in_thread(functools.partial(stores.prove, location)).result(DOCTOR_STORE_TIMEOUT())
        else:
            # A run creates the missing directories of its path.
            while not os.path.lexists(location):
                location = os.path.dirname(location)
            with tempfile.TemporaryFile(dir=location):
                pass
    except TimeoutError:
        seconds = DOCTOR_STORE_TIMEOUT()
        return f"store {root!r} did not accept a file within {seconds:g} s; check its address and credentials"
    except Exception as error:
        return f"store {root!r} cannot be written ({type(error).__name__}: {error}); check path and rights"
    return None
