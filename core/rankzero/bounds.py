"""Time limits in seconds that several modules share. A limit that one module reads stands in that module.

``tests/protocol/test_bounds.py`` has the relations between them, and to those of other modules.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

TIME_SCALE = "RANKZERO_TIME_SCALE"
"""Environment variable with the factor of all time limits that no argument sets."""


def scale(env: Mapping[str, str] = os.environ) -> float:
    """Returns the factor that `TIME_SCALE` gives, or 1. Raises InvalidJobError for one that is no positive number."""
    text = env.get(TIME_SCALE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        from rankzero.errors import InvalidJobError

        raise InvalidJobError(
            f"{TIME_SCALE}={text!r} is no positive number: unset it, or set it to 4 on a slow machine"
        )
    return factor


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns `TIME_SCALE` for a run's processes on other hosts: that of ``env``, else this process's, if it is set."""
    merged = {**os.environ, **env}
    scale(merged)
    return {TIME_SCALE: merged[TIME_SCALE]} if TIME_SCALE in merged else {}


def scaled(seconds: float) -> Callable[[], float]:
    """Returns a limit of a wait, a pause or an interval of messages, which `TIME_SCALE` stretches or shrinks."""
    return lambda: seconds * scale()


def stretched(seconds: float, least: float = math.inf) -> Callable[[], float]:
    """Returns a limit by which healthy processes are judged: `TIME_SCALE` stretches it, or shrinks it to ``least``."""
    return lambda: max(min(seconds, least), seconds * scale())


STOP_GRACE = 2.0  # Between SIGTERM and SIGKILL when a run fails or is cancelled, unless the job has another value
EXIT_TIMEOUT = 5.0  # For exit handlers and threads of a rank that has returned, unless the job has another value
HEARTBEAT_INTERVAL = 2.0  # Between two heartbeats in status.json
DRIVER_DEAD_AFTER = stretched(60.0, least=18.0)  # Without a heartbeat of a driver; longer than agents wait for it
CLOCK_SKEW = 300.0  # Most by which the clocks of two hosts may differ
STORE_OUTAGE = scaled(300.0)  # Retries at the end of a training, whose result is worth more than the wait
STORE_RETRY_INTERVAL = scaled(1.0)  # Between two requests to a store that fails
WRITE_RETRY_INTERVAL = scaled(0.5)  # Between two tries to write a checkpoint, a result or lines to such a store
LOG_TAIL_WIDTH = 2000  # Characters of each of the last lines of a rank that an error message shows
MEET_TIMEOUT = stretched(30.0)  # For a rank to connect to rank 0's rendezvous
CANCEL_TIMEOUT = stretched(30.0)  # Beyond stop_grace; nearly all of it if neither agents nor engine reply
STOP_MARGIN = stretched(2.0)  # Beyond the grace, until agents are cancelled at the engine, which has as long
REPORT_TIMEOUT = stretched(10.0)  # For the report, or the last card, of a run that has ended
TRACKERS_TIMEOUT = scaled(10.0)  # For all trackers after a run's end
CONNECTION_LOST_AFTER = stretched(45.0, least=13.5)  # Without a byte; after a cut of 20 s TCP resumes within 40
DELIVERY_INTERVAL = 0.5  # Between two deliveries of metrics, and of lines of a rank that prints little
STACKS_WINDOW = stretched(5.0)  # For stacks to arrive once a run counts as hung
CHECKPOINT_COMMIT_TIMEOUT = scaled(600.0)  # For checkpoints at a run's end, and for a rank that waits for one
WAITING_INTERVAL = scaled(30.0)  # Between two messages about what an attempt waits for

# Polls of what cannot wake the process that waits for it: the longer it usually takes, the longer the interval.
POLL_INTERVAL_SHORT = 0.05  # A lock or a file
POLL_INTERVAL = 0.1  # A directory, or a full window
POLL_INTERVAL_LONG = 0.5  # Ranks and slots
POLL_INTERVAL_LONGEST = 1.0  # A server that starts, or an owner
