"""Carries the level of the caller's root logger to the ranks, whose own logging is not configured."""

from __future__ import annotations

import logging
import os

LOG_LEVEL = "RANKZERO_LOG_LEVEL"
"""Environment variable of ranks with the level of their root logger, as a name or a number."""


def environment() -> dict[str, str]:
    """Returns `LOG_LEVEL` for the ranks; empty if the caller's root logger has Python's default level."""
    level = logging.getLogger().level
    return {} if level in (logging.NOTSET, logging.WARNING) else {LOG_LEVEL: logging.getLevelName(level)}


def apply() -> None:
    """Sets the level of this rank's root logger by `LOG_LEVEL`.

    The root logger gets no handler, since ``logging.basicConfig`` in the training function would then do nothing. Until
    the function configures logging, Python's handler of last resort writes the records.

    Raises:
        ValueError: the variable names no level.
    """
    text = os.environ.get(LOG_LEVEL)
    if not text:
        return
    level = int(text) if text.isdecimal() else text
    logging.getLogger().setLevel(level)
    if logging.lastResort:
        logging.lastResort.setLevel(level)
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
