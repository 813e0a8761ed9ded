"""The `rankzero` command: look at runs, end them, remove old ones. Everything it does, a library call does too."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from typing import Any

import click

from rankzero import __version__
from rankzero.errors import RankZeroError
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_KILO = 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """A time such as ``30d`` or ``12h``, in seconds. Raises click.BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value.strip())
    if not found or float(found[1]) == 0:
        raise click.BadParameter(f"{value!r} is no time: give a number and a unit, for example 30d, 12h, 45m")
    return float(found[1]) * SECONDS[found[2]]


class Commands(click.Group):
    """Commands whose expected errors are one line on standard error and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # `rankzero logs ... | head`: click knows what to do.
            raise
        except (RankZeroError, OSError, ImportError, ValueError) as error:
            first_line = (str(error) or "no reason given").splitlines()[0]
            raise click.ClickException(f"{type(error).__name__}: {first_line}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rankzero")
def main() -> None:
    """Look at runs of rankzero, end them, and remove old ones.

    A DIRECTORY is a run directory, a STORE holds run directories; both are local paths or fsspec URLs.
    """


@main.command()
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
        "started": _moment(found.started),
        "ended": _moment(found.ended),
        "checkpoint": found.checkpoint,
        "metrics": ", ".join(f"{name}={value}" for name, value in found.metrics.items()),
    }
    if found.result:
        facts["result"] = f"{found.result['uri']} ({found.result['format']}, {_bytes(found.result['size'])})"
    if found.error:
        facts["error"] = f"{found.error['type']}: {found.error['message']}"
    for name, value in facts.items():
        if value not in (None, ""):
            click.echo(f"{name:<11}{value}")


@main.command()
@click.argument("directory")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's lines, as it wrote them.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
def logs(directory: str, rank: int | None, follow: bool) -> None:
    """Show what the ranks wrote, in every attempt."""
    handle = RunHandle.attach(directory)
    world_size = RunDirectory(directory).job().num_processes
    if rank is not None and rank >= world_size:
        raise click.BadParameter(f"{rank} is no rank of this run, which has {world_size}", param_hint="--rank")
    for line in handle.logs(rank, follow):
        click.echo(line)


@main.command()
@click.argument("directory")
def cancel(directory: str) -> None:
    """Ask a run to end. Returns at once; `status` tells when it has."""
    handle = RunHandle.attach(directory)
    found = handle.status()
    if found.final:
        click.echo(f"run {handle.id} has ended already: {found.state}")
        return
    handle.cancel()
    click.echo(f"run {handle.id} is asked to end")


@main.command()
@click.argument("store")
@click.option("--older-than", required=True, callback=_seconds, metavar="TIME", help="Age of what goes: 30d, 12h.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, show what would be removed.")
@click.pass_context
def gc(ctx: click.Context, store: str, older_than: float, dry_run: bool) -> None:
    """Remove the directories of runs that ended long ago, with their logs, checkpoints and results.

    A run that lives is never removed, nor anything in STORE that is no run directory. A directory that cannot be
    read or removed is named on standard error, and makes the exit code 1; the others are removed all the same.
    """
    from rankzero.run.retention import collect

    collection = collect(store, older_than, dry_run)
    for removed in collection.removed:
        click.echo(f"{_moment(removed.since)}  {removed.state:<12}  {_bytes(removed.size):>9}  {removed.directory}")
    done = "would remove" if dry_run else "removed"
    click.echo(
        f"{done} {len(collection.removed)} of {len(collection.removed) + collection.kept} run directories, "
        f"{_bytes(collection.size)}"
    )
    for directory, problem in collection.problems.items():
        click.echo(f"Error: {directory}: {problem.splitlines()[0]}", err=True)
    if collection.problems:
        ctx.exit(1)


def _moment(when: float | None) -> str | None:
    return None if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _bytes(count: float) -> str:
    if count < _KILO:
        return f"{count:.0f} B"
    power = 0
    while count >= _KILO and power < len(_UNITS):
        count /= _KILO
        power += 1
    return f"{count:.1f} {_UNITS[power - 1]}"


if __name__ == "__main__":
    main()
