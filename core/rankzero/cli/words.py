"""Parses and formats times, sizes and names of runs of the command line, and completes names of files."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

import click
from click.shell_completion import CompletionItem

from rankzero import store
from rankzero.kinds import duration
from rankzero.report.page import plain
from rankzero.run import listing

_KILO = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Returns the seconds of a time such as ``30d`` or ``1h30m``; None for None. Raises click.BadParameter."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        if found := duration(value):
            return found
    raise click.BadParameter(f"{value!r} is no time: give numbers with units, for example 30d, 12h, 1h30m")


def pattern(ctx: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    """Returns a compiled regular expression; None for None. Raises click.BadParameter."""
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r} is no regular expression: {error}") from None


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Returns the values of a repeated ``NAME=VALUE`` option as a dict. Raises click.BadParameter."""
    for value in values:
        if not re.match(r"[^=]+=", value):
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE")
    return {value.partition("=")[0]: value.partition("=")[2] for value in values}


def moment(when: float | None) -> str | None:
    """Returns a Unix time as text in this machine's time zone."""
    try:
        return None if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        # The time is outside of the years that the platform can format.
        return f"{when:g}"


def size(count: float) -> str:
    """Returns a number of bytes as text, such as ``12 B`` or ``3.4 MiB``."""
    power = 0
    while count >= _KILO and power < len(_UNITS) - 1:
        count, power = count / _KILO, power + 1
    return f"{count:.{min(power, 1)}f} {_UNITS[power]}"


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the id of a run in the default store, or the name of a directory."""
    root = store.root_of(None)
    if "/" in incomplete or store.is_url(root):
        return [CompletionItem(incomplete, type="dir")]
    names = [listing.LAST, *store.list_names(store.normalize(root))]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def existing_store(given: str | None) -> str:
    """Returns the root of the run directories for an argument STORE. Raises FileNotFoundError if there is none."""
    root = store.normalize(store.root_of(given))
    listing.names_of(root)
    return root


def print_json(facts: Any) -> None:
    """Prints facts as one line of JSON, in which ``nan`` and infinity are texts."""
    click.echo(json.dumps(plain(facts), allow_nan=False))
