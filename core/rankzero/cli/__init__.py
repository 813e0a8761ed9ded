"""The `rankzero` command starts runs, shows them, ends them, and removes old ones, each by a call of the library.

Shell completion is click's: ``eval "$(_RANKZERO_COMPLETE=bash_source rankzero)"``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from rankzero import __version__
from rankzero.cli import words
from rankzero.cli.doctor import doctor
from rankzero.cli.run import run
from rankzero.cli.show import explain, logs, report, runs, serve, status
from rankzero.run.handle import RunHandle
from rankzero.run.listing import find_run


class Commands(click.Group):
    """A group of commands, whose errors print one line to standard error and exit with code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command, and turns an error into a `click.ClickException` unless ``--debug`` is given."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
            # A closed pipe, as in `rankzero logs ... | head`, is handled by click.
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            first_line = (str(error) or "no reason given").splitlines()[0]
            raise click.ClickException(f"{type(error).__name__}: {first_line}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rankzero")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Start runs of rankzero, show them, end them, and remove old ones.

    A RUN is a run directory, the id of a run, a part of the id that no other one contains, or "last". A STORE holds run
    directories; without it, $RANKZERO_STORE, else ~/.rankzero/runs. Both are local paths or fsspec URLs.
    """


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
@click.argument("store", required=False, type=click.Path())
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
        words.print_json(asdict(collection))
    else:
        for removed in collection.removed:
            click.echo(f"{words.moment(removed.since)}  {removed.state:<9}  {removed.directory}")
        done = "would remove" if dry_run else "removed"
        click.echo(f"{done} {len(collection.removed)}, {collection.kept} runs stay")
    for directory, problem in collection.problems.items():
        click.echo(f"Error: {directory}: {problem.splitlines()[0]}", err=True)
    if collection.problems:
        ctx.exit(1)


for _command in (run, runs, status, logs, explain, cancel, report, serve, doctor, gc):
    main.add_command(_command)
