"""Parses and formats times and sizes of the command line, and completes names of files."""

from __future__ import annotations

import re
import time

import click
from click.shell_completion import CompletionItem

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_KILO = 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Returns the seconds of a time such as ``30d`` or ``12h``; None for None. Raises click.BadParameter."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value.strip())
    if not found or float(found[1]) == 0:
        raise click.BadParameter(f"{value!r} is no time: give a number and a unit, for example 30d, 12h, 45m")
    return float(found[1]) * SECONDS[found[2]]


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
    if count < _KILO:
        return f"{count:.0f} B"
    power = 0
    while count >= _KILO and power < len(_UNITS):
        count /= _KILO
        power += 1
    return f"{count:.1f} {_UNITS[power - 1]}"


def directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tells the shell to complete the name of a directory."""
    return [CompletionItem(incomplete, type="dir")]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tells the shell to complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]
