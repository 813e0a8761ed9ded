"""What the errors of a Spark Connect server mean, in words and types of ours."""

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
    """The typed error for the text of an exception of a client of Spark Connect."""
    if re.search(_INTERRUPTED, text):
        return EngineError(f"the stage was interrupted at {server} from outside of rankzero: {spark.first_lines(text)}")
    if UNREACHED in text:
        found = spark.explain(text)
        return EngineError(
            f"{found}. Executors must reach this host by TCP (ports= for a firewall), or see the run directory: then a "
            "submitted run, and that of a pipeline's step, is driven in its stage",
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
    """True if an exception says that the server, or the session there, is not the one that there was."""
    return re.search(_SERVER_LOST, text) is not None and "rankzero agent" not in text
