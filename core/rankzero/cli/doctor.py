"""``rankzero doctor``: finds the problems that would stop a training on a cluster, and shows how to fix them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rankzero.cli import words
from rankzero.cli.run import engine_of
from rankzero.errors import InvalidJobError

if TYPE_CHECKING:
    from rankzero.doctor.examine import Examination

_MARKS = {"ok": ("+", "green"), "warning": ("!", "yellow"), "problem": ("x", "red")}


@click.command()
@click.option("--engine", "--master", "engine", default="local", show_default=True, help="As in `rankzero run`.")
@click.option("--conn-id", metavar="ID", help="An Airflow connection as the engine: rankzero, spark or spark_connect.")
@click.option("--conf", multiple=True, callback=words.pairs, metavar="NAME=VALUE", help="Spark configuration.")
@click.option("-n", "--num-processes", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks.")
@click.option("--processes-per-task", type=click.IntRange(min=1), help="Ranks of one Spark task.  [default: 1]")
@click.option("--use-gpu", is_flag=True, help="A GPU for each rank.")
@click.option("--store", metavar="STORE", help="Root of the run directories. [default: $RANKZERO_STORE]")
@click.option("--start-timeout", callback=words.seconds, metavar="TIME", default="2m", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="All findings and facts, as one JSON object.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    engine: str,
    conn_id: str | None,
    conf: dict[str, str],
    start_timeout: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the problems that would stop a training.

    First checks this machine: Java, pyspark, the master, the store. Then starts ranks, which check where they run:
    torch, GPUs, the network, clocks, and the store. Every problem is shown with its fix.

    Exit codes: 0 no problem found; 1 a problem would stop a training.
    """
    from rankzero.doctor.examine import examine

    given = {name: value for name, value in options.items() if value}
    # Airflow's import configures a log of standard output, which is for the findings.
    with contextlib.redirect_stdout(sys.stderr):
        cluster = {"engine": engine_of(engine, conf)} if conn_id is None else _connection(conn_id, conf)
        found = examine(**{**cluster, **given}, start_timeout=start_timeout)
    if as_json:
        words.print_json({"healthy": found.healthy, **asdict(found)})
    else:
        _show(found)
    ctx.exit(0 if found.healthy else 1)


def _connection(conn_id: str, conf: dict[str, str]) -> dict[str, Any]:
    # An orchestrator's package maps a connection's id to arguments of `examine`.
    for entry in importlib.metadata.entry_points(group="rankzero.connections"):
        found: dict[str, Any] = entry.load()(conn_id, conf)
        return found
    raise InvalidJobError(f"--conn-id {conn_id} is a connection of Airflow: pip install 'apache-airflow>=3.1' here")


def _show(found: Examination) -> None:
    for finding in found.findings:
        mark, color = _MARKS[finding.level]
        click.echo(f"{click.style(mark, fg=color)} {finding.about}: {finding.what}")
        if advice := finding.mend:
            click.echo(f"    {advice}")
    if found.healthy:
        click.echo("trainings can run here")
    elif found.directory:
        click.echo(f"the output of the ranks: rankzero logs {found.directory}")
