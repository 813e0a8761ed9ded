"""The `rankzero` command starts runs, shows them, ends them, and removes old ones, each by a call of the library.

Each module holds the commands for one purpose: `run` starts runs, `show` and `doctor` inspect them, and `end` ends
them. Shell completion is click's: ``eval "$(_RANKZERO_COMPLETE=bash_source rankzero)"``.
"""

from __future__ import annotations

from typing import Any

import click

from rankzero import __version__
from rankzero.cli.doctor import doctor
from rankzero.cli.end import cancel, gc
from rankzero.cli.explain import explain
from rankzero.cli.run import run
from rankzero.cli.show import logs, report, runs, serve, status


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


for _command in (run, runs, status, logs, explain, cancel, report, serve, doctor, gc):
    main.add_command(_command)
