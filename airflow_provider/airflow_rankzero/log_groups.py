"""Facts of a phase of a training, folded together in the task's log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankzero.pipeline import describe_world

if TYPE_CHECKING:
    from rankzero import Launcher, RunHandle

REPORT_LINES = 20
"""Reports in the log's table, evenly chosen."""


def show(log: Any, title: str, facts: Mapping[str, Any]) -> None:
    """Writes facts that are not empty as a group of lines, which Airflow's UI shows as its title until it is opened."""
    log.info("::group::%s", title)
    for name, value in facts.items():
        if value not in (None, "", {}, []):
            log.info("%s: %s", name, value)
    log.info("::endgroup::")


_GROUP = re.compile(r"::(?=(?:end)?group::)")


def show_line(log: Any, text: str) -> None:
    """Writes a line of a rank, with the level at its beginning; a group that it would open or end is only a text."""
    from rankzero.pipeline import level_of

    # An invisible character within, since Airflow's page searches whole lines.
    log.log(level_of(text), "%s", _GROUP.sub(":\u200b:", text))


def show_reports(log: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a group with the losses' curves and a table of rank 0's reports; none if there were no reports."""
    if not rows:
        return
    from rankzero.pipeline import curves

    log.info("::group::Reports of rank 0")
    for name in curves.loss_names(rows):
        if drawn := curves.text(rows, name):
            log.info("%s: %s", name, drawn)
    for line in curves.table(curves.evenly(rows, REPORT_LINES)):
        log.info("%s", line)
    log.info("::endgroup::")


def describe(handle: RunHandle[Any], launcher: Launcher, lease: float | None) -> dict[str, Any]:
    """Returns the facts about a run at its start: directory, engine, ranks, and its time without a follower, if any."""
    assert launcher.engine
    return {
        "run directory": handle.directory,
        "engine": ", ".join(str(word) for word in launcher.engine.to_spec()[0].values() if word),
        "ranks": describe_world(launcher.num_processes),
        "GPUs": describe_world(launcher.num_processes) if launcher.use_gpu else None,
        "attempt": handle.status().attempt,
        "continues without a follower, s": lease,
    }
