"""Carries the level of the caller's root logger to the ranks, whose own logging is not configured."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from rankzero.errors import InvalidJobError

LOG_LEVEL = "RANKZERO_LOG_LEVEL"
"""Environment variable of ranks with the level of their root logger, as a name or a number."""


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns `LOG_LEVEL` for the ranks as a number, since they may not know a name that the caller has added.

    Args:
        env: The variables that the caller sets, whose level takes precedence over that of the caller's root logger.

    Returns:
        The variable; nothing if ``env`` names no level and the root logger has Python's default one.

    Raises:
        InvalidJobError: ``env`` names an unknown level.
    """
    if text := env.get(LOG_LEVEL):
        try:
            return {LOG_LEVEL: str(_number(text))}
        except ValueError as error:
            raise InvalidJobError(f"env: {error}") from None
    level = logging.getLogger().level
    return {} if level in (logging.NOTSET, logging.WARNING) else {LOG_LEVEL: str(level)}


def _number(text: str) -> int:
    try:
        return int(logging.getLevelNamesMapping().get(text.upper(), text))
    except ValueError:
        raise ValueError(f"{LOG_LEVEL}={text!r} names no level: use DEBUG, or a number") from None


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
    level = _number(text)
    logging.getLogger().setLevel(level)
    if logging.lastResort:
        logging.lastResort.setLevel(level)
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
