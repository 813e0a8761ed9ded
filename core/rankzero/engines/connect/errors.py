"""Translates errors of a Spark Connect server into rankzero's typed errors."""

from __future__ import annotations

import re

from rankzero.engines.spark import errors as spark
from rankzero.errors import LOST, EngineError, RankZeroError

_SERVER_LOST = (
    r"SESSION_CHANGED|SESSION_CLOSED|SESSION_NOT_FOUND|OPERATION_NOT_FOUND|OPERATION_ABANDONED|OPERATION_ALREADY_EXISTS|"
    r"RESPONSE_ALREADY_RECEIVED|StatusCode\.UNAVAILABLE|failed to connect|Connection refused|Socket closed|GOAWAY|"
    r"NO_ACTIVE_SESSION"
)
UNREACHED = "no driver was found on port"
_INTERRUPTED = r"OPERATION_CANCELED|OPERATION_CANCELLED"


def explain(text: str, server: str) -> RankZeroError:
    """Returns the typed error for the text of an exception of a Spark Connect client."""
    if re.search(_INTERRUPTED, text):
        return EngineError(f"the stage was interrupted at {server} from outside of rankzero: {spark.first_lines(text)}")
    if UNREACHED in text:
        found = spark.explain(text)
        return EngineError(
            f"{found}. Executors must reach this host by TCP (ports= for a firewall), or see the run directory: then "
            "the driver of a submitted run, or of a pipeline's step, runs inside the stage",
            cause=LOST,
        )
    if is_server_lost(text):
        return EngineError(
            f"the Spark Connect server {server} has ended, was restarted or cannot be reached: "
            f"{spark.first_lines(text)}",
            cause=LOST,
        )
    return spark.explain(text)


def is_server_lost(text: str) -> bool:
    """Returns True for an exception that shows that the server, or its session, ended or was replaced."""
    return re.search(_SERVER_LOST, text) is not None and "rankzero agent" not in text
