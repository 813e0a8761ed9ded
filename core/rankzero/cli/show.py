"""Commands that show runs in a terminal, in a browser, or as JSON: runs, status, logs, explain, report, serve."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rankzero.cli import words
from rankzero.job import Job
from rankzero.options import TABLE
from rankzero.report import serve as served
from rankzero.report.card import duration
from rankzero.report.summary import usage
from rankzero.run.directory import LINES, RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.identity import describe
from rankzero.run.lines import Line, parsed
from rankzero.run.listing import Listed, find_run, list_runs
from rankzero.run.status import STATES, RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_INTERVAL = 2.0  # Seconds between two listings of a store with --watch

COLORS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "blue", "starting": "cyan"}

_HEADS = ("run", "state", "ranks", "submitted", "took", "used", "metrics")
_METRICS = 4
_LINES_OF_RUN = 2
_LINES_AROUND = 3  # The header, the note about runs that are not shown, and the prompt


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("-o", "--output", help="The file of the page, by default report.html; - for standard output.")
@click.option("--json", "as_json", is_flag=True, help="The facts that the page shows, as JSON, instead of the page.")
def report(run: str, output: str | None, as_json: bool) -> None:
    """Write the report of a run: one HTML file that needs no network.

    The directory of a run that has ended already contains its report, report.html.
    """
    from rankzero.report import page

    handle = RunHandle.attach(find_run(run), follows=False)
    if as_json:
        words.print_json(page.collect(handle))
        return
    text, output = page.draw(handle), output or "report.html"
    with click.open_file(output, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    if output != "-":
        click.echo(output)


@click.command()
@click.argument("store", required=False, type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0 for any free one.")
@click.option("--host", default=served.HOST, show_default=True, help="Address to listen on: 0.0.0.0 in a container.")
def serve(store: str | None, port: int, host: str) -> None:
    """Show the runs of a STORE in a browser of this machine, until interrupted. Read only.

    The printed address contains a token, which keeps out other users of this machine.
    """
    root = words.existing_store(store)
    with served.ReportServer(root, port, os.environ.get("RANKZERO_SERVE_TOKEN"), host) as server:
        click.echo(f"the runs of {root}, until Ctrl-C, at\n{server.url}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("--json", "as_json", is_flag=True, help="All facts, as one JSON object.")
def status(run: str, as_json: bool) -> None:
    """Show the state of a run."""
    handle = RunHandle.attach(find_run(run), follows=False)
    job = handle.job
    found = handle.status()
    if as_json:
        words.print_json(_as_json(Listed(handle.directory, job, found)))
        return
    facts = {
        "run": handle.id,
        "trains": f"{job.name} on {found.world_size or job.world} ranks",
        "state": found.shown,
        "attempt": found.attempt,
        "driver": f"process {found.driver_pid} on {found.driver_host}" if found.driver_pid else None,
        "directory": handle.directory,
        "engine": None if found.final else found.engine_url,
        "started": words.moment(found.started),
        "ended": words.moment(found.ended),
        "used": usage(job, found, time.time()),
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
@click.argument("run", shell_complete=words.runs)
@click.option("--rank", multiple=True, type=click.IntRange(min=0), help="Only this rank; may be given several times.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option("--since", callback=words.seconds, metavar="TIME", help="Only lines of the last 10m, 2h.")
@click.option("--grep", callback=words.pattern, metavar="PATTERN", help="Only lines that match a regular expression.")
@click.option("--timestamps", "-t", is_flag=True, help="Begin each line with its time.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line.")
def logs(
    run: str,
    rank: tuple[int, ...],
    tail: int | None,
    since: float | None,
    grep: re.Pattern[str] | None,
    timestamps: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the output of the ranks, of every attempt, in the order of its times.

    The time of a line is the time at which the driver of the run received it.
    """
    # A follower keeps the run alive; a reader of its lines so far does not.
    handle = RunHandle.attach(find_run(run), follows=follow)
    world_size = handle.job.num_processes
    if wrong := [one for one in rank if one >= world_size]:
        raise click.BadParameter(f"{wrong[0]} is no rank of this run, which has {world_size}", param_hint="--rank")
    begin = None if since is None else time.time() - since
    stream = handle.stream(LINES)

    def new(status: RunStatus | None = None) -> Iterator[Line]:
        for line in parsed(stream.new(status), rank or None):
            is_late = begin is None or line.time is None or line.time >= begin
            if is_late and (grep is None or grep.search(line.prefixed)):
                yield line

    def show(line: Line) -> None:
        if as_json:
            words.print_json({"rank": line.rank, "line": line.text, "time": line.time, "run_id": handle.id})
        else:
            when = f"{words.moment(line.time) or '':19} " if timestamps else ""
            click.echo(when + (line.text if len(rank) == 1 else line.prefixed))

    for line in new() if tail is None else collections.deque(new(), tail):
        show(line)
    while follow:
        status = handle.status()
        for line in new(status):
            show(line)
        if status.final:
            break
        handle.pause()


@click.command()
@click.argument("store", required=False, type=click.Path())
@click.option("--state", multiple=True, type=click.Choice(STATES), help="Only runs in one of these states.")
@click.option("--label", multiple=True, callback=words.pairs, help="Only runs with this label, NAME=VALUE.")
@click.option("--since", callback=words.seconds, metavar="TIME", help="Only runs submitted in the last 12h, 30d.")
@click.option("--watch", "-w", is_flag=True, help="Refresh the table in a terminal every 2 s until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run.")
def runs(
    store: str | None,
    state: tuple[str, ...],
    label: dict[str, str],
    since: float | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Show the runs of a STORE, the newest last."""
    root = words.existing_store(store)

    def found() -> list[Listed]:
        chosen = [
            one
            for one in list_runs(root)
            if (not state or one.status.state in state)
            and label.items() <= one.job.labels.items()
            and (since is None or one.job.created > time.time() - since)
        ]
        return sorted(chosen, key=lambda one: one.job.created)

    if as_json:
        for one in found():
            words.print_json(_as_json(one))
    elif sys.stdout.isatty():
        _show_table(found, watch=watch)
    else:
        for line in [_HEADS, *map(_cells, found())]:
            click.echo("\t".join(line))


def _as_json(one: Listed) -> dict[str, Any]:
    job = one.job
    own = {"id": job.run_id, "directory": one.directory, "name": job.name, "world": job.world, "created": job.created}
    used = usage(job, one.status, time.time())
    return {**own, "labels": job.labels, **asdict(one.status), "used": used}


def _cells(one: Listed) -> tuple[str, ...]:
    """Returns the texts of a run's row: each is one printable line."""
    job, status = one.job, one.status
    now = time.time()
    took = "" if status.started is None else duration(round(max(0.0, (status.ended or now) - status.started), 1))
    numbers = {name: value for name, value in status.metrics.items() if type(value) in (int, float)}
    shown = [f"{name}={_short(value)}" for name, value in numbers.items() if not name.startswith("total_")]
    cells = (
        job.run_id,
        status.state,
        job.world,
        words.moment(job.created) or "",
        took,
        usage(job, status, now),
        " ".join(shown[:_METRICS]),
    )
    return tuple("".join(char if char.isprintable() else repr(char)[1:-1] for char in cell) for cell in cells)


def _short(number: float) -> str:
    """Returns a number with four digits; ``?`` for an integer that is larger than any float."""
    try:
        return f"{number:.4g}"
    except OverflowError:
        return "?"


def _show_table(find: Callable[[], Sequence[Listed]], *, watch: bool) -> None:
    """Prints the table once, or again and again until interrupted."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not watch:
        console.print(_table(find()))
        return
    # Only the newest runs fit into the terminal.
    most = max(1, (console.height - _LINES_AROUND) // _LINES_OF_RUN)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_table(find(), most), refresh=True)
            time.sleep(WATCH_INTERVAL)


def _table(found: Sequence[Listed], most: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = found if most is None else found[-most:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    for head in ("state", "ranks", "submitted", "used"):
        table.add_column(head, no_wrap=True)
    for run, state, ranks, submitted, took, used, metrics in map(_cells, shown):
        # Text does not interpret a run's name as markup.
        name = Group(Text(run), Text(metrics, style="dim", no_wrap=True, overflow="ellipsis"))
        when = Text(submitted[5:16] or submitted).append(f"\n{took}", style="dim")
        hours = Text(used.replace("  ", "\n"))
        table.add_row(name, Text(state, style=COLORS.get(state, "")), ranks, when, hours)
    left_out = len(found) - len(shown)
    return Group(f"{left_out} older runs are not shown", table) if left_out else table


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each submission.")
def explain(run: str, as_json: bool) -> None:
    """Explain why each submission of a run resumed or began from scratch, with which options, and what was shipped.

    Submissions that attached to a living run, or got an earlier result, are not recorded, since they wrote nothing.
    """
    directory, before = RunDirectory(find_run(run)), None
    directory.job()
    for job in filter(None, map(directory.job_of, directory.numbers())):
        sentences = [job.beginning or "where it began is not recorded", *_changes(before, job)]
        sentences += [f"shipped: {name}, {facts.get('size')} bytes" for name, facts in job.files.items()]
        before = job
        if as_json:
            words.print_json({"submission": job.submission, "created": job.created, "explanation": sentences})
        else:
            click.echo(f"submission {job.submission}, {words.moment(job.created)}: {sentences[0]}")
            for sentence in sentences[1:]:
                click.echo(f"  {sentence}")


def _changes(before: Job | None, job: Job) -> Iterator[str]:
    """Yields the options that were given, and those that the submission before had otherwise."""
    names = [name for name in TABLE if name in vars(job) and name not in ("run_id", "engine", "checkpoints")]
    given = {name: getattr(job, name) for name in names if getattr(job, name) not in (TABLE[name].default, {}, [])}
    master = job.engine.get("master") or job.engine.get("server") or job.engine.get("kind")
    yield f"options: {', '.join(f'{name}={value!r}' for name, value in {'engine': master, **given}.items())}"
    if before and (other := [name for name in ("engine", *names) if getattr(before, name) != getattr(job, name)]):
        yield f"options that differ from the submission before: {', '.join(other)}"
    if parts := tuple(name for name in job.identity_parts if name not in TABLE):
        yield f"another training if one of these changes: {describe(parts)}"
