"""What the report of a run shows, as JSON: collected from its directory, thinned out, without secrets."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from rankzero.errors import RunNotFoundError
from rankzero.report import series
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.run.handle import RunHandle
from rankzero.run.reports import is_number, rows_of, throughput

LOG_CHARACTERS = 2_000_000
"""Of the lines of all ranks together that a report holds; of each rank the last ones."""

LINE_CHARACTERS = 2_000
"""A longer line is cut."""

MAX_MARKS = 500
"""Checkpoints, failures, restarts and the like that a report shows: the first half and the last."""

SLOWER = 1.2
"""A rank that takes so many times as long between two reports as the median rank is named as the straggler."""

MAX_METRICS = 60
"""Curves that a report draws; the names of the others are listed."""

STEP_NAMES = ("step", "global_step", "iteration", "epoch")
"""Metrics that are steps: the first that was reported is a curve's other axis."""

_MARKS = ("checkpoint", "failure", "restart", "waiting", "world", "left-out", "engine", "state")
_HIDDEN = ("files", "log_starts", "engine", "owner", "labels", "identity", "created")
_USAGE = ("cpu", "memory", "received", "sent")


def collect(handle: RunHandle[Any]) -> dict[str, Any]:
    """Everything that the page shows of one run, as JSON. Reads the whole directory but values and checkpoints.

    Raises:
        RunNotFoundError: no run lives there, or what lies there was not written by rankzero.
    """
    try:
        return _collect(handle)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunNotFoundError(f"{handle.directory} cannot be read as a run of rankzero ({what})") from error


def _collect(handle: RunHandle[Any]) -> dict[str, Any]:
    run = RunDirectory(handle.directory)
    job, status = run.job(), handle.status()
    # An earlier submission of this run id may have been another training.
    events = [event for event in handle.events() if isinstance(event, dict) and _is_of(event, job.created)]
    metrics = [event for event in events if event["type"] == "metric" and isinstance(event.get("metrics"), dict)]
    names = list(dict.fromkeys(name for event in metrics for name in event["metrics"]))
    return {
        "id": handle.id,
        "directory": handle.directory,
        "name": job.name,
        "state": status.state,
        "error": status.error,
        "created": job.created,
        "started": status.started,
        "ended": status.ended,
        "now": time.time(),
        "world": job.world,
        "attempt": status.attempt,
        "labels": job.labels,
        "identity": job.identity,
        "engine_url": status.engine_url if not status.final else None,
        "result": status.result,
        "last": {name: value for name, value in status.metrics.items() if is_number(value)},
        "throughput": throughput(rows_of(metrics)),
        "config": _config(vars(job), status),
        "steps": next((name for name in STEP_NAMES if name in names), None),
        "curves": _curves(metrics, names),
        "not_drawn": [name for name in names if name not in STEP_NAMES][MAX_METRICS:],
        "ranks": _ranks(events),
        "straggler": _straggler(metrics),
        "marks": _marks(events),
        "hosts": _hosts(events),
        "checkpoints": [
            {
                "id": manifest.id,
                "metrics": manifest.metrics,
                "size": sum(_size(part) for part in manifest.parts.values()),
            }
            for manifest in handle.checkpoints()
        ],
        "logs": _logs(handle, job.num_processes),
    }


def _is_of(event: Mapping[str, Any], created: float) -> bool:
    return is_number(event.get("time")) and isinstance(event.get("type"), str) and event["time"] >= created - 1.0


def _config(job: Mapping[str, Any], status: RunStatus) -> dict[str, Any]:
    shown = {name: value for name, value in job.items() if name not in _HIDDEN and value not in (None, {}, [])}
    place = {"engine": job["engine"].get("kind"), "master": job["engine"].get("master")}
    driver = {"driver": f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else None}
    return {name: value for name, value in {**place, **shown, **driver}.items() if value is not None}


def _curves(metrics: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """A metric's curve for each rank that reported it: columns of times, steps and values."""
    drawn = [name for name in names if name not in STEP_NAMES][:MAX_METRICS]
    step_name = next((name for name in STEP_NAMES if name in names), None)
    points: dict[str, dict[int, list[series.Point]]] = {name: defaultdict(list) for name in drawn}
    counts: dict[int, int] = defaultdict(int)
    for event in metrics:
        rank, row = event["rank"], event["metrics"]
        counts[rank] += 1
        step = row.get(step_name) if step_name else None
        where = (event["time"], float(step) if is_number(step) else float(counts[rank]))
        for name in row.keys() & points.keys():
            if is_number(row[name]):
                points[name][rank].append((*where, float(row[name])))
    limit = series.budget(sum(len(by_rank) for by_rank in points.values()))
    curves = []
    for name, by_rank in points.items():
        ranks = [
            {"rank": rank, **_columns(series.thin(found, series.MAX_POINTS if rank == 0 else limit))}
            for rank, found in sorted(by_rank.items())
        ]
        if ranks:
            curves.append({"name": name, "ranks": ranks})
    return curves


def _columns(points: list[series.Point]) -> dict[str, list[float]]:
    times, steps, values = zip(*points, strict=True)
    return {"t": [round(when, 3) for when in times], "s": list(steps), "v": [float(f"{value:.6g}") for value in values]}


def _ranks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rank in each attempt: when it started, had torch, entered the user's code, reported last, ended, and how."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    attempt = 0
    for event in events:
        kind, rank = event["type"], event.get("rank")
        if kind == "state":
            attempt = event.get("attempt", attempt)
        if kind == "entered":
            facts = {name: event.get(name) for name in ("rank", "attempt", "host", "started", "imported", "torch")}
            found[event["attempt"], event["rank"]] = {**facts, "entered": event["time"], "reports": 0}
        elif known := found.get((event.get("attempt", attempt), rank if isinstance(rank, int) else -1)):
            if kind == "metric":
                known |= {"reported": event["time"], "reports": known["reports"] + 1}
            elif kind == "returned":
                known |= {"ended": event["time"], "outcome": "returned"}
            elif kind == "failure":
                known |= {"ended": event["time"], "outcome": "failed", "what": str(event.get("what"))}
    return sorted(found.values(), key=lambda rank: (rank["attempt"], rank["rank"]))


def _straggler(metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank whose reports are furthest apart, if it stands out from the others."""
    times: dict[int, list[float]] = defaultdict(list)
    for event in metrics:
        times[event["rank"]].append(event["time"])
    gaps = {
        rank: statistics.median(after - before for before, after in itertools.pairwise(moments))
        for rank, moments in times.items()
        if len(moments) > 2
    }
    if len(gaps) < 2:
        return None
    slowest = max(gaps, key=lambda rank: gaps[rank])
    usual = statistics.median(gap for rank, gap in gaps.items() if rank != slowest)
    if usual <= 0 or gaps[slowest] < SLOWER * usual:
        return None
    return {"rank": slowest, "seconds": gaps[slowest], "usual": usual}


def _marks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    marks = [
        {"type": event["type"], "time": event["time"], "rank": event.get("rank"), "text": _text(event)}
        for event in events
        if event["type"] in _MARKS
    ]
    half = MAX_MARKS // 2
    return marks if len(marks) <= MAX_MARKS else marks[:half] + marks[-half:]


def _text(event: Mapping[str, Any]) -> str:
    if event["type"] == "checkpoint":
        return f"checkpoint {event.get('id')}"
    if event["type"] == "state":
        return f"attempt {event.get('attempt')} is {event.get('state')}"
    return str(event.get("what", event["type"]))


def _hosts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each host's processors, memory, network and GPUs did."""
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["type"] == "usage":
            samples[str(event.get("host"))].append(event)
    hosts = []
    for host, found in sorted(samples.items()):
        columns = {name: _series(found, name) for name in _USAGE}
        gpus = [gpu for sample in found for gpu in [sample.get("gpus") or []]]
        for index in range(max(map(len, gpus), default=0)):
            for name in ("use", "memory"):
                rows = [
                    {"time": sample["time"], name: sample["gpus"][index][name]}
                    for sample in found
                    if sample.get("gpus")
                ]
                columns[f"gpu {index} {name}"] = _series(rows, name)
        last = found[-1]
        totals = {name: last.get(name) for name in ("cores", "memory_total")}
        if last.get("gpus"):
            totals["gpu_memory_total"] = last["gpus"][0]["memory_total"]
        hosts.append({"host": host, **totals, "columns": {name: rows for name, rows in columns.items() if rows["v"]}})
    return hosts


def _series(samples: Iterable[Mapping[str, Any]], name: str) -> dict[str, list[float]]:
    points = [
        (row["time"], float(index), float(row[name])) for index, row in enumerate(samples) if is_number(row.get(name))
    ]
    return _columns(series.thin(points, series.MAX_POINTS)) if points else {"t": [], "s": [], "v": []}


def _size(part: Mapping[str, Any]) -> int:
    size = part.get("size")
    return size if isinstance(size, int) else 0


def _logs(handle: RunHandle[Any], world_size: int) -> list[dict[str, Any]]:
    """The last lines of every rank, from one pass over all."""
    room = max(LINE_CHARACTERS, LOG_CHARACTERS // max(1, world_size))
    kept: dict[int, deque[str]] = {rank: deque() for rank in range(world_size)}
    used, cut = dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)
    for line in handle.logs():
        head, _, text = line.partition("] ")
        rank = int(head[1:]) if head[:1] == "[" and head[1:].isdecimal() else -1
        if rank not in kept:
            continue
        kept[rank].append(text[:LINE_CHARACTERS])
        used[rank] += len(text[:LINE_CHARACTERS])
        while used[rank] > room:
            used[rank] -= len(kept[rank].popleft())
            cut[rank] += 1
    return [{"rank": rank, "lines": list(lines), "cut": cut[rank]} for rank, lines in kept.items() if lines]
