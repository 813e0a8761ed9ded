"""``rankzero runs``, ``status`` and ``logs``: show runs in a terminal, in a pipe, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from rankzero.cli import table, words
from rankzero.report import cost
from rankzero.run.directory import STATES, RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.lines import split_rank
from rankzero.run.listing import Listed, list_runs

WATCH_INTERVAL = 2.0
"""Seconds between two listings of a store with ``--watch``."""


@click.command()
@click.argument("directory", shell_complete=words.directories)
@click.option("--json", "as_json", is_flag=True, help="All facts, as one JSON object.")
def status(directory: str, as_json: bool) -> None:
    """Show the state of a run."""
    handle = RunHandle.attach(directory)
    job = RunDirectory(directory).job()
    found = handle.status()
    if as_json:
        used = _used(Listed(handle.directory, job, found))
        click.echo(json.dumps({"id": handle.id, "directory": handle.directory, **asdict(found), "used": used}))
        return
    facts = {
        "run": handle.id,
        "trains": f"{job.name} on {found.world_size or job.world} ranks",
        "state": found.shown,
        "attempt": found.attempt,
        "driver": f"process {found.driver_pid} on {found.driver_host}" if found.driver_pid else None,
        "engine": None if found.final else found.engine_url,
        "started": words.moment(found.started),
        "ended": words.moment(found.ended),
        "used": str(cost.usage(job, found, time.time()) or ""),
        "checkpoint": found.checkpoint,
        "metrics": ", ".join(f"{name}={value}" for name, value in found.metrics.items()),
    }
    if found.result:
        facts["result"] = f"{found.result['uri']} ({found.result['format']}, {words.size(found.result['size'])})"
    if found.error:
        facts["error"] = f"{found.error.get('type')}: {found.error.get('message')}"
    for name, value in facts.items():
        if value not in (None, ""):
            click.echo(f"{name:<11}{value}")


@click.command()
@click.argument("directory", shell_complete=words.directories)
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's lines, as it wrote them.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line.")
def logs(directory: str, rank: int | None, follow: bool, as_json: bool) -> None:
    """Show the output of the ranks, of every attempt."""
    handle = RunHandle.attach(directory)
    world_size = RunDirectory(directory).job().num_processes
    if rank is not None and rank >= world_size:
        raise click.BadParameter(f"{rank} is no rank of this run, which has {world_size}", param_hint="--rank")
    for line in handle.logs(rank, follow):
        click.echo(_as_object(line, rank) if as_json else line)


def _as_object(line: str, rank: int | None) -> str:
    found = split_rank(line) if rank is None else None
    rank, text = found or (rank, line)
    return json.dumps({"rank": rank, "line": text})


@click.command()
@click.argument("store", shell_complete=words.directories)
@click.option(
    "--state",
    multiple=True,
    type=click.Choice(STATES),
    metavar="STATE",
    help=f"Only runs in this state: {', '.join(STATES)}; may be given several times.",
)
@click.option("--name", help="Only runs whose id or function holds this text.")
@click.option("--label", multiple=True, callback=words.pairs, help="Only runs with this label, NAME=VALUE.")
@click.option("--since", callback=words.seconds, metavar="TIME", help="Only runs submitted in the last 12h, 30d.")
@click.option("--watch", "-w", is_flag=True, help="Refresh every 2 s until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run.")
def runs(
    store: str,
    state: tuple[str, ...],
    name: str | None,
    label: dict[str, str],
    since: float | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Show the runs of a STORE, the newest last."""

    def found() -> list[Listed]:
        chosen = [
            one
            for one in list_runs(store)
            if (not state or one.status.state in state)
            and (name is None or name in one.job.run_id or name in one.job.name)
            and label.items() <= one.job.labels.items()
            and (since is None or one.job.created > time.time() - since)
        ]
        return sorted(chosen, key=lambda one: one.job.created)

    if sys.stdout.isatty() and not as_json:
        table.show(found, WATCH_INTERVAL if watch else None)
        return
    while True:
        for line in map(_as_json, found()) if as_json else table.plain(found()):
            click.echo(line)
        if not watch:
            break
        time.sleep(WATCH_INTERVAL)


def _as_json(one: Listed) -> str:
    job = one.job
    facts = {"id": job.run_id, "directory": one.directory, "name": job.name, "world": job.world, "created": job.created}
    return json.dumps({**facts, "labels": job.labels, **asdict(one.status), "used": _used(one)})


def _used(one: Listed) -> dict[str, Any] | None:
    found = cost.usage(one.job, one.status, time.time())
    return None if found is None else asdict(found)
