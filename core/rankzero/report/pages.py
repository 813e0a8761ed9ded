"""Read-only pages of a store, independent of the server: the list of its runs, the report of one or several runs."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero import store
from rankzero.errors import RankZeroError, RunNotFoundError
from rankzero.job import Job
from rankzero.report import facts, page
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.listing import list_runs

HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
"""Of every answer."""

FOUND, MISSING = 200, 404

Answer = tuple[int, str, str]
"""Code, type of the content, and the content."""

MaySee = Callable[[Job], bool]
"""Whether who asks may see a run: its lines may tell what its data are."""


def answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee = lambda job: True) -> Answer:
    """The answer to a request.

    Args:
        location: Root of the run directories.
        path: ``/`` for the list of runs, ``/runs/ID`` for a report, ``/runs/ID.json`` for its facts, ``/compare`` for
            several runs.
        query: Of ``/compare``: the ids as ``run``.
        may_see: A run that it denies is not there for who asks.
    """
    try:
        return _answer(location, path, query, may_see)
    except (RankZeroError, OSError, ValueError) as error:
        return MISSING, "text/plain", str(error).splitlines()[0] if str(error) else ""


def _answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee) -> Answer:
    if path == "/":
        return FOUND, "text/html", page.render_list(location, _listed(location, may_see))
    if path == "/compare":
        if "run" not in query:
            raise ValueError("name runs: compare?run=ID&run=ID")
        return FOUND, "text/html", page.render([_run(location, one, may_see) for one in query["run"]])
    if path.startswith("/runs/") and path.endswith(".json"):
        name = path.removeprefix("/runs/").removesuffix(".json")
        return FOUND, "application/json", json.dumps(page.plain(_run(location, name, may_see)), allow_nan=False)
    if path.startswith("/runs/"):
        return FOUND, "text/html", page.render([_run(location, path.removeprefix("/runs/"), may_see)])
    return MISSING, "text/plain", "there is no such page"


def _run(location: str, name: str, may_see: MaySee) -> dict[str, Any]:
    name = urllib.parse.unquote(name)
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no run id")
    directory = store.join(location, name)
    if not may_see(RunDirectory(directory).job()):
        raise RunNotFoundError(f"no run lives in {directory}")
    return facts.collect(RunHandle.attach(directory))


def _listed(location: str, may_see: MaySee) -> list[dict[str, Any]]:
    return [
        {
            "id": one.job.run_id,
            "name": one.job.name,
            "state": one.status.state,
            "world": one.job.world,
            "created": one.job.created,
            "started": one.status.started,
            "ended": one.status.ended,
            "used": facts.used_of(one.job, one.status),
            "last": one.status.metrics,
        }
        for one in sorted(list_runs(location), key=lambda one: -one.job.created)
        if may_see(one.job)
    ]
