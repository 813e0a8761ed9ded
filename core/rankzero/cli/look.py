"""``rankzero runs``, ``status`` and ``logs``: look at runs in a terminal, in a pipe, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from rankzero.cli import words
from rankzero.run.card import duration
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.lines import split_rank
from rankzero.run.listing import Listed, list_runs

WATCH_INTERVAL = 2.0
"""Seconds between two looks at a store."""

COLORS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "blue", "starting": "cyan"}

_HEADS = ("run", "state", "ranks", "submitted", "took", "metrics")
_METRICS = 4


@click.command()
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="All facts, as one JSON object.")
def status(directory: str, as_json: bool) -> None:
    """Show the state of a run."""
    handle = RunHandle.attach(directory)
    job = RunDirectory(directory).job()
    found = handle.status()
    if as_json:
        click.echo(json.dumps({"id": handle.id, "directory": handle.directory, **asdict(found)}))
        return
    facts = {
        "run": handle.id,
        "trains": f"{job.name} on {found.world_size or job.world} ranks",
        "state": found.state,
        "attempt": found.attempt,
        "driver": f"process {found.driver_pid} on {found.driver_host}" if found.driver_pid else None,
        "engine": None if found.final else found.engine_url,
        "started": words.moment(found.started),
        "ended": words.moment(found.ended),
        "checkpoint": found.checkpoint,
        "metrics": ", ".join(f"{name}={value}" for name, value in found.metrics.items()),
    }
    if found.result:
        facts["result"] = f"{found.result['uri']} ({found.result['format']}, {words.size(found.result['size'])})"
    if found.error:
        facts["error"] = f"{found.error['type']}: {found.error['message']}"
    for name, value in facts.items():
        if value not in (None, ""):
            click.echo(f"{name:<11}{value}")


@click.command()
@click.argument("directory")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's lines, as it wrote them.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line.")
def logs(directory: str, rank: int | None, follow: bool, as_json: bool) -> None:
    """Show what the ranks wrote, in every attempt."""
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
@click.argument("store")
@click.option("--state", multiple=True, help="Only runs in this state; may be given several times.")
@click.option("--name", help="Only runs whose id or function holds this text.")
@click.option("--label", multiple=True, callback=words.pairs, help="Only runs with this label, NAME=VALUE.")
@click.option("--since", callback=words.seconds, metavar="TIME", help="Only runs submitted in the last 12h, 30d.")
@click.option("--watch", "-w", is_flag=True, help="Look again every 2 s until interrupted.")
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

    if as_json:
        for one in found():
            facts = {"id": one.job.run_id, "directory": one.directory, "name": one.job.name, "world": one.job.world}
            facts |= {"created": one.job.created, "labels": one.job.labels}  # type: ignore[dict-item]
            click.echo(json.dumps({**facts, **asdict(one.status)}))
    elif sys.stdout.isatty():
        _show_table(found, watch=watch)
    else:
        while True:
            for line in _plain(found()):
                click.echo(line)
            if not watch:
                break
            time.sleep(WATCH_INTERVAL)


def _row(one: Listed) -> tuple[str, ...]:
    status = one.status
    took = None if status.started is None else (status.ended or time.time()) - status.started
    metrics = [f"{name}={value:.4g}" for name, value in status.metrics.items() if type(value) in (int, float)]
    submitted = words.moment(one.job.created) or ""
    shown = " ".join(metrics[:_METRICS])
    return one.job.run_id, status.state, one.job.world, submitted, "" if took is None else duration(took), shown


def _plain(found: Sequence[Listed]) -> list[str]:
    """Columns that a script can cut: separated by tabs."""
    return ["\t".join(_HEADS), *("\t".join(_row(one)) for one in found)]


def _show_table(found: Any, *, watch: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not watch:
        console.print(_table(found()))
        return
    with Live(_table(found()), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(WATCH_INTERVAL)
                live.update(_table(found()), refresh=True)
        except KeyboardInterrupt:
            pass


def _table(found: Sequence[Listed]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for head in _HEADS:
        table.add_column(head, overflow="fold" if head in ("run", "metrics") else "ellipsis", no_wrap=head == "state")
    for one in found:
        # Text: the name of a run is no markup.
        cells = [Text(cell) for cell in _row(one)]
        cells[1].stylize(COLORS.get(one.status.state, ""))
        table.add_row(*cells)
    return table
