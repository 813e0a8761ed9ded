"""``rankzero runs``, ``status``, ``logs``, ``report``, ``serve``: show runs in a terminal, in a browser, or as JSON."""

from __future__ import annotations

import collections
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rankzero import store
from rankzero.cli import words
from rankzero.report import serve as served
from rankzero.report.card import duration
from rankzero.report.summary import usage
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.run.listing import UNKNOWN, Listed, find_run, list_runs
from rankzero.run.names import DRIVER_LOG, REPORT_FILE
from rankzero.run.output import Line
from rankzero.run.status import STATES

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_INTERVAL = 2.0  # Seconds between two listings of a store with --watch

COLORS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "blue", "starting": "cyan"}

_HEADS = ("run", "state", "ranks", "submitted", "took", "used", "metrics")
_METRICS = 4
_LINES_OF_RUN = 2
_LINES_AROUND = 3
"""Lines of the header, the note about runs that are not shown, and the prompt."""


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("-o", "--output", help="The file of the page, by default report.html; - for standard output.")
@click.option(
    "--link",
    callback=words.seconds,
    metavar="TIME",
    help="Write nothing: print a link to the report on the object store that works for 24h, 7d, without credentials.",
)
@click.option("--json", "as_json", is_flag=True, help="The facts that the page shows, as JSON, instead of the page.")
def report(run: str, output: str | None, link: float | None, as_json: bool) -> None:
    """Write the report of a run: one HTML file that needs no network.

    The directory of a run that has ended already contains its report, report.html.
    """
    from rankzero.report import page

    if output not in (None, "-") and (as_json or link is not None):
        raise click.UsageError("-o is for the page: leave it out with --json and --link")
    handle = RunHandle.attach(find_run(run), follows=False)
    if link is not None:
        address = store.presign(store.join(handle.directory, REPORT_FILE), link)
        if as_json:
            words.print_json({"directory": handle.directory, "link": address})
        else:
            click.echo(address)
    elif as_json:
        words.print_json(page.collect(handle))
    elif output == "-":
        click.echo(page.draw(handle), nl=False)
    else:
        text, output = page.draw(handle), output or "report.html"
        with open(output, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        click.echo(output)


@click.command()
@click.argument("store", required=False, shell_complete=words.directories)
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0 for any free one.")
@click.option(
    "--host", default=served.HOST, show_default=True, help="Address to listen on, such as 0.0.0.0 in a container."
)
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
        own = {"id": handle.id, "directory": handle.directory}
        words.print_json({**own, **asdict(found), "used": usage(job, found, time.time())})
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
@click.option("--attempt", type=click.IntRange(min=0), metavar="N", help="Only lines of this attempt, from 0.")
@click.option("--grep", callback=words.pattern, metavar="PATTERN", help="Only lines that match a regular expression.")
@click.option("--timestamps", "-t", is_flag=True, help="Begin each line with its time.")
@click.option("--driver", is_flag=True, help="The output of the run's driver and its JVM instead, driver.log.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line.")
def logs(
    run: str,
    rank: tuple[int, ...],
    tail: int | None,
    since: float | None,
    attempt: int | None,
    grep: re.Pattern[str] | None,
    timestamps: bool,
    driver: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the output of the ranks, of every attempt, in the order of its times.

    The time of a line is the time at which the driver of the run received it.
    """
    # A follower keeps the run alive; a reader of its lines so far does not.
    handle = RunHandle.attach(find_run(run), follows=follow)
    world_size = handle.job.num_processes
    if driver and (rank or since is not None or attempt is not None or timestamps):
        raise click.UsageError(
            "--rank, --since, --attempt and --timestamps are for lines of ranks; those of --driver contain their times"
        )
    if follow and (driver or attempt is not None):
        raise click.UsageError("--driver and --attempt show what has been written so far: leave out --follow")
    if wrong := [one for one in rank if one >= world_size]:
        raise click.BadParameter(f"{wrong[0]} is no rank of this run, which has {world_size}", param_hint="--rank")
    begin = -math.inf if since is None else time.time() - since
    end = math.inf
    if attempt is not None:
        began, end = _times_of(handle, attempt)
        begin = max(begin, began)

    def lines(follow: bool) -> Iterator[Line]:
        found = _driver_log(handle) if driver else handle.output.lines(Position(), follow, ranks=rank or None)
        return (
            line
            for line in found
            if (since is attempt is None or line.time is None or begin <= line.time < end) and _matches(line, grep)
        )

    def show(line: Line) -> None:
        if as_json:
            words.print_json({"rank": line.rank, "line": line.text, "time": line.time, "run_id": handle.id})
        else:
            when = f"{words.moment(line.time) or '':19} " if timestamps else ""
            click.echo(when + (line.text if len(rank) == 1 else line.prefixed))

    if tail is not None:
        for line in collections.deque(lines(follow=False), tail):
            show(line)
    if tail is None or follow:
        for line in lines(follow):
            show(line)


def _times_of(handle: RunHandle[Any], attempt: int) -> tuple[float, float]:
    """Returns the Unix times between which the driver received the lines of an attempt."""
    begins: dict[int, float] = {}
    for event in handle.events():
        if event["type"] == "state":
            begins.setdefault(event["attempt"], event["time"])
    if attempt not in begins:
        known = ", ".join(map(str, begins)) or "none yet"
        raise click.BadParameter(
            f"{attempt} is no attempt of this training, which had: {known}", param_hint="--attempt"
        )
    return begins[attempt], min((when for number, when in begins.items() if number > attempt), default=math.inf)


def _matches(line: Line, pattern: re.Pattern[str] | None) -> bool:
    return pattern is None or bool(pattern.search(line.prefixed))


def _driver_log(handle: RunHandle[Any]) -> Iterator[Line]:
    try:
        own = Submission(RunDirectory(handle.directory), handle.job)
        text = store.read_bytes(own.path(DRIVER_LOG)).decode("utf-8", "replace")
    except FileNotFoundError:
        why = "its driver had no process of its own"
        if store.is_url(handle.directory):
            why = "a run on an object store keeps none; if its driver dies, its submitter's error shows the last lines"
        raise click.ClickException(f"run {handle.id} has no {DRIVER_LOG}: {why}") from None
    yield from (Line("", None, line) for line in text.splitlines())


@click.command()
@click.argument("store", required=False, shell_complete=words.directories)
@click.option(
    "--state",
    multiple=True,
    type=click.Choice(STATES),
    metavar="STATE",
    help=f"Only runs in this state: {', '.join(STATES)}; may be given several times.",
)
@click.option("--name", help="Only runs whose id or function holds this text.")
@click.option("--label", multiple=True, callback=words.labels, help="Only runs with this label, NAME=VALUE.")
@click.option("--since", callback=words.seconds, metavar="TIME", help="Only runs submitted in the last 12h, 30d.")
@click.option("--watch", "-w", is_flag=True, help="Refresh every 2 s until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run.")
def runs(
    store: str | None,
    state: tuple[str, ...],
    name: str | None,
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
            and (name is None or name in one.job.run_id or name in one.job.name)
            and label.items() <= one.job.labels.items()
            and (since is None or one.job.created > time.time() - since)
        ]
        return sorted(chosen, key=lambda one: one.job.created)

    if sys.stdout.isatty() and not as_json:
        _show_table(found, WATCH_INTERVAL if watch else None)
        return
    while True:
        if as_json:
            for one in found():
                words.print_json(_as_json(one))
        else:
            click.echo("\n".join(_plain(found())))
        if not watch:
            break
        time.sleep(WATCH_INTERVAL)


def _as_json(one: Listed) -> dict[str, Any]:
    job = one.job
    facts: dict[str, Any] = {"problem": one.problem} if one.problem else {}
    facts |= {
        "id": job.run_id,
        "directory": one.directory,
        "name": job.name,
        "world": job.world,
        "created": job.created,
    }
    return {**facts, "labels": job.labels, **asdict(one.status), "used": usage(one.job, one.status, time.time())}


def _plain(found: Sequence[Listed]) -> list[str]:
    """Returns a header and a line for each run, with columns separated by tabs."""
    return ["\t".join(line) for line in [_HEADS, *map(_cells, found)]]


def _cells(one: Listed) -> tuple[str, ...]:
    """Returns the texts of a run's row: each is one printable line."""
    job, state = one.job, one.status.state
    if one.problem:
        return job.run_id, state, state, state, state, state, one.problem
    cells = (
        job.run_id,
        state,
        job.world,
        words.moment(job.created) or "",
        _took(one),
        usage(one.job, one.status, time.time()),
        _metrics(one),
    )
    return tuple("".join(char if char.isprintable() else repr(char)[1:-1] for char in cell) for cell in cells)


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
    for run, state, ranks, submitted, took, used, metrics in map(_cells, shown):
        # Text does not interpret a run's name as markup.
        facts = Text(metrics, style="dim", no_wrap=True, overflow="ellipsis")
        when = Text(submitted[5:16] or submitted)
        when.append(f"\n{took}", style="dim")
        hours, _, price = used.partition("  ")
        table.add_row(
            Group(Text(run), facts),
            Text(state, style=COLORS.get(state, "")),
            ranks,
            when,
            Text(f"{hours}\n{price}".rstrip()),
        )
    left_out = len(found) - len(shown)
    return Group(f"{left_out} older runs are not shown", table) if left_out else table


def _took(one: Listed) -> str:
    status = one.status
    if status.started is None:
        return ""
    return duration(round(max(0.0, (status.ended or time.time()) - status.started), 1))


def _metrics(one: Listed) -> str:
    numbers = {name: value for name, value in one.status.metrics.items() if type(value) in (int, float)}
    shown = [f"{name}={_short(value)}" for name, value in numbers.items() if not name.startswith("total_")]
    return " ".join(shown[:_METRICS])


def _short(number: float) -> str:
    """Returns a number with four digits; ``?`` for an integer that is larger than any float."""
    try:
        return f"{number:.4g}"
    except OverflowError:
        return UNKNOWN
