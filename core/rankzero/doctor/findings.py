"""`collect_facts` is a training that examines the hosts of its ranks; `judge` turns their facts into findings."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.bounds import CLOCK_SKEW

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check of an examination.

    Attributes:
        level: ``"ok"``, ``"warning"`` (trainings run, with a disadvantage) or ``"problem"``.
        about: Subject of the check, in one or two words.
        what: Result of the check.
        mend: Advice to the user; empty if there is nothing to do.
    """

    level: str
    about: str
    what: str
    mend: str = ""


def collect_facts(store_url: str | None, nonce: str) -> list[dict[str, Any]]:
    """Returns the facts of every rank, in the order of ranks.

    Args:
        store_url: URL of the store's root, for an object store.
        nonce: Part of the name of the folder in which each rank writes an object of its own.
    """
    import torch

    import rankzero.train as rt

    facts: dict[str, Any] = {"entered": time.time()}
    context = rt.get_context()
    facts |= {
        "rank": context.rank,
        "host": socket.gethostname(),
        "python": f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})",
        "torch": str(torch.__version__),
        "device": context.device.type,
    }
    rt.barrier()
    facts["together"] = time.time()
    # Stores refuse simultaneous writes of one object. Without its name equal reasons are one finding.
    folder, own = f".doctor-{nonce}", f".doctor-{nonce}/{context.rank}"
    level, why = _use_store(context.storage_path, store_url and f"{store_url}/{own}")
    facts["store"] = level, why.replace(own, folder)
    return rt.all_gather_object(facts)


def _use_store(directory: str | None, url: str | None) -> tuple[str, str]:
    """Returns the level of a finding, and its reason: can this rank write into the directory, or the object?"""
    why = "" if url is None else "pyarrow, or its client of this store, is not installed"
    try:
        if directory is not None:
            with tempfile.TemporaryFile(dir=directory):
                return OK, ""
    except OSError as error:
        return PROBLEM, f"{type(error).__name__}: {error.strerror}"
    from rankzero.store import remote

    if url and (client := remote.find_client(url)):
        try:
            with client.open_write(url) as file:
                file.write(b"doctor")
            return OK, ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    return WARNING, why


def judge(ranks: Sequence[dict[str, Any]], started: float | None, *, store: str) -> list[Finding]:
    """Returns the findings from the facts of all ranks.

    Args:
        ranks: The facts that `collect_facts` has collected, in the order of ranks.
        started: Unix time by the driver's clock at which all ranks had started.
        store: Root of the run directories.
    """
    hosts = ", ".join(f"{host} ({len(there)})" for host, there in _each(ranks, "host").items())
    found = [
        Finding(OK, "slots", f"{len(ranks)} ranks ran at the same time and met, on {hosts}"),
        Finding(OK, "Python", ", ".join(_each(ranks, "python"))),
        Finding(OK, "torch", f"{', '.join(_each(ranks, 'torch'))}, on {', '.join(_each(ranks, 'device'))}"),
    ]
    if len(torches := _each(ranks, "torch")) > 1:
        shown = "; ".join(f"{version}: {_names(there)}" for version, there in torches.items())
        found[-1] = Finding(PROBLEM, "torch", f"differs: {shown}", "install one version of torch on all hosts")
    return [*found, _judge_clocks(ranks, started), *_judge_store(ranks, store)]


def _each(ranks: Sequence[dict[str, Any]], name: str) -> dict[Any, list[int]]:
    """Returns the values of a fact, each with the ranks that have it."""
    found: dict[Any, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts[name], []).append(rank)
    return found


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _judge_clocks(ranks: Sequence[dict[str, Any]], started: float | None) -> Finding:
    # Relative to the clock of rank 0: all ranks read their clocks at the same moment.
    ahead = {facts["host"]: facts["together"] - ranks[0]["together"] for facts in ranks}
    if started is not None:
        # The ranks entered the function just after all had started.
        ahead["the driver"] = started - ranks[0]["entered"]
    fast, slow = max(ahead, key=lambda name: ahead[name]), min(ahead, key=lambda name: ahead[name])
    apart = ahead[fast] - ahead[slow]
    if apart <= CLOCK_SKEW:
        return Finding(OK, "clocks", f"within {max(0.1, apart):.1f} s")
    what = f"{fast} is {apart:.0f} s ahead of {slow}: a driver that runs may seem dead"
    return Finding(PROBLEM, "clocks", what, "keep the hosts' clocks right (chrony, systemd-timesyncd)")


def _judge_store(ranks: Sequence[dict[str, Any]], store: str) -> list[Finding]:
    advice = {
        PROBLEM: "check the mount and the rights there",
        WARNING: "these ranks send checkpoints and results to the driver: mount it there, or install its client",
    }
    found = [
        Finding(level, "store", f"{store} is not written by {_names(there)}: {why}".removesuffix(": "), advice[level])
        for (level, why), there in _each(ranks, "store").items()
        if level != OK
    ]
    return found or [Finding(OK, "store", f"{store}: driver and ranks write it")]
