"""Turns the facts that ranks have collected into findings, with pure functions."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.bounds import CLOCK_SKEW

SKEW_WARNING = 5.0  # Seconds between two clocks above which logs and metrics of hosts are hard to compare

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


def judge(ranks: Sequence[dict[str, Any]], started: float | None, *, use_gpu: bool, store: str) -> list[Finding]:
    """Returns the findings from the facts of all ranks.

    Args:
        ranks: The facts that `rankzero.doctor.probe` has collected, in the order of ranks.
        started: Unix time by the driver's clock at which all ranks had started.
        use_gpu: Whether each rank was given a GPU.
        store: Root of the run directories.
    """
    return [
        *_slots(ranks),
        *_versions(ranks),
        *_gpus(ranks, use_gpu=use_gpu),
        *_clocks(ranks, started),
        *_network(ranks),
        *_store(ranks, store),
    ]


def _each(ranks: Sequence[dict[str, Any]], name: str) -> dict[str, list[int]]:
    """Returns the values of a fact, each with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for facts in ranks:
        found.setdefault(str(facts.get(name)), []).append(facts["rank"])
    return found


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _slots(ranks: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    hosts = _each(ranks, "host")
    shown = ", ".join(f"{host} ({len(there)})" for host, there in hosts.items())
    yield Finding(OK, "slots", f"{len(ranks)} ranks ran at the same time, on {shown}")


def _versions(ranks: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    minors = {".".join(facts["python"].split(".")[:2]) for facts in ranks}
    ours = ".".join(platform.python_version_tuple()[:2])
    pythons = ", ".join(sorted(_each(ranks, "python")))
    if minors != {ours}:
        yield Finding(
            PROBLEM,
            "Python",
            f"{pythons} on the ranks, {ours} here",
            "set spark.pyspark.python to a Python of the same minor version, which unpickles functions of the other",
        )
    else:
        yield Finding(OK, "Python", f"{pythons} ({', '.join(sorted(_each(ranks, 'executable')))})")
    torches = _each(ranks, "torch")
    if len(torches) > 1:
        shown = "; ".join(f"{version}: {_names(there)}" for version, there in torches.items())
        yield Finding(PROBLEM, "torch", f"differs: {shown}", "install one version of torch on all hosts")
    else:
        yield Finding(OK, "torch", next(iter(torches)))


def _gpus(ranks: Sequence[dict[str, Any]], *, use_gpu: bool) -> Iterator[Finding]:
    problems = _each([facts for facts in ranks if facts["device_problem"]], "device_problem")
    for problem, there in problems.items():
        yield Finding(PROBLEM, "GPUs", f"{_names(there)}: {problem}", "install a torch for this GPU, and its driver")
    if use_gpu and not problems:
        kinds = ", ".join(sorted({name for facts in ranks for name in facts["gpus"]}))
        yield Finding(OK, "GPUs", f"one for each rank ({kinds}); NCCL {ranks[0]['nccl']}")


def _clocks(ranks: Sequence[dict[str, Any]], started: float | None) -> Iterator[Finding]:
    # Relative to the clock of rank 0: all ranks read their clocks at the same moment.
    ahead = {facts["host"]: facts["together"] - ranks[0]["together"] for facts in ranks}
    if started is not None:
        # The ranks entered the function just after all had started.
        ahead["the driver"] = started - ranks[0]["entered"]
    fast, slow = max(ahead, key=lambda name: ahead[name]), min(ahead, key=lambda name: ahead[name])
    apart = ahead[fast] - ahead[slow]
    what, mend = f"{fast} is {apart:.0f} s ahead of {slow}", "keep the hosts' clocks right (chrony, systemd-timesyncd)"
    if apart > CLOCK_SKEW:
        yield Finding(PROBLEM, "clocks", f"{what}: a driver that runs may seem dead", mend)
    elif apart > SKEW_WARNING:
        yield Finding(WARNING, "clocks", what, mend)
    else:
        yield Finding(OK, "clocks", f"within {max(0.1, apart):.1f} s")


def _network(ranks: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    yield Finding(OK, "executors to driver", "every rank's agent reached it")
    if speeds := [facts["bandwidth"] for facts in ranks if "bandwidth" in facts]:
        what = f"{min(speeds):.0f} MB/s of a tensor that all {len(ranks)} ranks reduce"
        yield Finding(OK, "all-reduce", what)


def _store(ranks: Sequence[dict[str, Any]], store: str) -> Iterator[Finding]:
    broken = _each([facts for facts in ranks if facts["store"].get("problem")], "store")
    for what, there in broken.items():
        yield Finding(PROBLEM, "store", f"{store}, {_names(there)}: {what}", "check the mount and the rights there")
    there = [facts["rank"] for facts in ranks if facts["store"].get("reached")]
    if broken:
        return
    if len(there) == len(ranks):
        yield Finding(OK, "store", f"{store}: driver and ranks write it")
    else:
        whys = sorted({str(facts["store"]["why"]) for facts in ranks if facts["store"].get("why")})
        missing = [facts["rank"] for facts in ranks if facts["rank"] not in there]
        yield Finding(
            WARNING,
            "store",
            f"{store} is not written by {_names(missing)}{': ' if whys else ''}{'; '.join(whys)}",
            "these ranks send checkpoints and results to the driver: mount the store there, or install its client",
        )
