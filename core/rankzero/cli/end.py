"""``rankzero cancel`` and ``rankzero gc``: cancel runs, remove old ones."""

from __future__ import annotations

import os
import sys

import click

from rankzero.cli import words
from rankzero.run.handle import RunHandle
from rankzero.run.listing import find_run


@click.command()
@click.argument("run", shell_complete=words.runs)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def cancel(run: str, as_json: bool) -> None:
    """Cancel a run. Returns without waiting for its end; `rankzero status` shows when it has ended."""
    handle = RunHandle.attach(find_run(run))
    found = handle.status()
    if not found.final:
        handle.cancel()
    if as_json:
        words.print_json({"id": handle.id, "state": found.state, "asked": not found.final})
    elif found.final:
        click.echo(f"run {handle.id} has ended already: {found.state}")
    else:
        click.echo(f"run {handle.id} was asked to stop")


@click.command()
@click.argument("store", required=False, shell_complete=words.directories)
@click.option("--older-than", required=True, callback=words.seconds, metavar="TIME", help="Minimum age: 30d, 12h.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, show what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print the removed directories as one JSON object.")
@click.pass_context
def gc(ctx: click.Context, store: str | None, older_than: float, dry_run: bool, as_json: bool) -> None:
    """Remove the directories of runs that ended long ago, with their logs, checkpoints and results.

    A run that is still running is never removed, and neither is anything in STORE that is not a run directory. A
    directory that cannot be read or removed is named on standard error, and the exit code is 1; all others are removed.
    """
    from rankzero.run.retention import collect

    root = words.existing_store(store)
    collection = collect(root, older_than, dry_run)
    if as_json:
        words.print_json(collection.to_json())
    else:
        for removed in [*collection.removed, *collection.checkpoints]:
            since = words.moment(removed.since)
            # A relative name fits into a line of a terminal.
            name = os.path.relpath(removed.directory, root) if sys.stdout.isatty() else removed.directory
            click.echo(f"{since}  {removed.state:<9}  {words.size(removed.size):>9}  {name}")
        done = "would remove" if dry_run else "removed"
        click.echo(
            f"{done} {len(collection.removed)} of {len(collection.removed) + collection.kept} run directories, "
            + (f"{len(collection.checkpoints)} earlier checkpoints, " if collection.checkpoints else "")
            + words.size(collection.size)
        )
    for directory, problem in collection.problems.items():
        click.echo(f"Error: {directory}: {problem.splitlines()[0]}", err=True)
    if collection.problems:
        ctx.exit(1)
