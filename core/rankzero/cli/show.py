"""``rankzero runs``, ``status``, ``logs``, ``report``, ``serve``: show runs in a terminal, in a browser, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rankzero import bounds
from rankzero.cli import words
from rankzero.report import cost
from rankzero.report.card import duration
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.lines import split_rank
from rankzero.run.listing import Listed, list_runs
from rankzero.run.status import STATES

if TYPE_CHECKING:
    from rich.console import RenderableType


COLORS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "blue", "starting": "cyan"}

_HEADS = ("run", "state", "ranks", "submitted", "took", "used", "metrics")
_METRICS = 4
_LINES_OF_RUN = 2
_LINES_AROUND = 3
"""Lines of the header, the note about runs that are not shown, and the prompt."""


@click.command()
@click.argument("directory", nargs=-1, required=True, shell_complete=words.directories)
@click.option(
    "-o", "--output", default="report.html", show_default=True, help="The file to write; - for standard output."
)
@click.option(
    "--link",
    callback=words.seconds,
    metavar="TIME",
    help="Write nothing: print a link to the report on the object store that works for 24h, 7d, without credentials.",
)
@click.option("--json", "as_json", is_flag=True, help="The facts that the page shows, as JSON, instead of the page.")
def report(directory: tuple[str, ...], output: str, link: float | None, as_json: bool) -> None:
    """Write the report of a run, or of several runs side by side: one HTML file that needs no network.

    The directory of a run that has ended already contains its report, report.html.
    """
    from rankzero import store
    from rankzero.report import facts, page

    if link is not None:
        for one in directory:
            address = store.presign(store.join(RunHandle.attach(one, follows=False).directory, page.REPORT_FILE), link)
            click.echo(json.dumps({"directory": one, "link": address}) if as_json else address)
        return
    runs = [facts.collect(RunHandle.attach(one, follows=False)) for one in directory]
    text = json.dumps({"runs": runs}) + "\n" if as_json else page.render(runs)
    if as_json or output == "-":
        click.echo(text, nl=False)
        return
    with open(output, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    click.echo(output)


@click.command()
@click.argument("store", shell_complete=words.directories)
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0 for any free one.")
@click.option("--no-token", is_flag=True, help="Serve every process of this machine, such as a proxy with a login.")
def serve(store: str, port: int, no_token: bool) -> None:
    """Show the runs of a STORE in a browser of this machine, until interrupted. Read only.

    The printed address contains a token, which keeps out other users of this machine.
    """
    from rankzero.report.pages import ReportServer

    with ReportServer(store, port, "" if no_token else None) as server:
        click.echo(f"the runs of {store}, until Ctrl-C, at\n{server.url}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()


@click.command()
@click.argument("directory", shell_complete=words.directories)
@click.option("--json", "as_json", is_flag=True, help="All facts, as one JSON object.")
def status(directory: str, as_json: bool) -> None:
    """Show the state of a run."""
    handle = RunHandle.attach(directory, follows=False)
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
    # A follower keeps the run alive; a reader of its lines so far does not.
    handle = RunHandle.attach(directory, follows=follow)
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
        _show_table(found, bounds.WATCH_INTERVAL if watch else None)
        return
    while True:
        for line in map(_as_json, found()) if as_json else _plain(found()):
            click.echo(line)
        if not watch:
            break
        time.sleep(bounds.WATCH_INTERVAL)


def _as_json(one: Listed) -> str:
    job = one.job
    facts = {"id": job.run_id, "directory": one.directory, "name": job.name, "world": job.world, "created": job.created}
    return json.dumps({**facts, "labels": job.labels, **asdict(one.status), "used": _used(one)})


def _used(one: Listed) -> dict[str, Any] | None:
    found = cost.usage(one.job, one.status, time.time())
    return None if found is None else asdict(found)


def _plain(found: Sequence[Listed]) -> list[str]:
    """Returns a header and a line for each run, with columns separated by tabs."""
    lines = [_HEADS]
    for one in found:
        submitted = words.moment(one.job.created) or ""
        state, ranks = one.status.state, one.job.world
        lines.append((one.job.run_id, state, ranks, submitted, _took(one), " ".join(_price_of(one)), _metrics(one)))
    return ["\t".join(line) for line in lines]


def _show_table(find: Callable[[], Sequence[Listed]], interval: float | None) -> None:
    """Prints the table once, or every ``interval`` seconds until interrupted."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if interval is None:
        console.print(_table(find()))
        return
    # Only the newest runs fit into the terminal.
    most = max(1, (console.height - _LINES_AROUND) // _LINES_OF_RUN)
    with Live(_table(find(), most), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(_table(find(), most), refresh=True)
        except KeyboardInterrupt:
            pass


def _table(found: Sequence[Listed], most: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = found if most is None else found[-most:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    for head in ("state", "ranks", "submitted", "used"):
        table.add_column(head, no_wrap=True)
    for one in shown:
        # Text does not interpret a run's name as markup.
        metrics = Text(_metrics(one), style="dim", no_wrap=True, overflow="ellipsis")
        state = Text(one.status.state, style=COLORS.get(one.status.state, ""))
        when = Text((words.moment(one.job.created) or "")[5:16])
        when.append(f"\n{_took(one)}", style="dim")
        table.add_row(Group(Text(one.job.run_id), metrics), state, one.job.world, when, Text("\n".join(_price_of(one))))
    left_out = len(found) - len(shown)
    return Group(f"{left_out} older runs are not shown", table) if left_out else table


def _took(one: Listed) -> str:
    status = one.status
    if status.started is None:
        return ""
    return duration(round(max(0.0, (status.ended or time.time()) - status.started), 1))


def _price_of(one: Listed) -> tuple[Any, ...]:
    """Returns the hours that a run has used, and their price if it is known."""
    found = cost.usage(one.job, one.status, time.time())
    return () if found is None else (found.amount, *([found.price] if found.price else []))


def _metrics(one: Listed) -> str:
    numbers = {name: value for name, value in one.status.metrics.items() if type(value) in (int, float)}
    shown = [f"{name}={value:.4g}" for name, value in numbers.items() if not name.startswith("total_")]
    return " ".join(shown[:_METRICS])
