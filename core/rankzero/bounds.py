"""Time limits in seconds that hold in relation to each other in several processes, and sizes that modules share.

``tests/test_bounds.py`` has the relations. Any other limit that one module reads stands in that module.
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
    """Returns a limit by which healthy processes are judged: `TIME_SCALE` stretches it.

    Args:
        seconds: The limit.
        least: The seconds to which `TIME_SCALE` may shrink it; by default it never does.
    """
    return lambda: max(min(seconds, least), seconds * scale())


STOP_GRACE = 2.0  # Between SIGTERM and SIGKILL when a run fails or is cancelled, unless the job has another value
EXIT_TIMEOUT = 5.0  # For exit handlers and threads of a rank that has returned, unless the job has another value
HEARTBEAT_INTERVAL = 2.0  # Between two heartbeats in status.json
DRIVER_DEAD_AFTER = stretched(60.0, least=18.0)  # Without a heartbeat of a driver; longer than agents wait for it
CLOCK_SKEW = 300.0  # Most by which the clocks of two hosts may differ
STORE_OUTAGE = scaled(300.0)  # Retries at the end of a training, whose result is worth more than the wait
STORE_RETRY_INTERVAL = scaled(1.0)  # Between two requests to a store that fails
WRITE_RETRY_INTERVAL = scaled(0.5)  # Between two tries to write a checkpoint, a result or lines to such a store
UNFINISHED_AFTER = stretched(3600.0)  # Since its last change, for a temporary file to count as left by a killed process
LOG_TAIL, LOG_TAIL_WIDTH = 20, 2000  # Last lines of a rank kept for an error message, and characters of each
MEET_TIMEOUT = stretched(30.0)  # For a rank to connect to rank 0's rendezvous

# Who cancels a run, and the run's driver.
CANCEL_TIMEOUT = stretched(30.0)  # Beyond stop_grace; nearly all of it if neither agents nor engine reply
OWNER_LEASE = stretched(20.0)  # For which a driver on the cluster outlives its run's owner process
SESSION_CLOSE_TIMEOUT = stretched(10.0)  # For an engine session to close (a SparkContext to stop)
STOP_MARGIN = stretched(2.0)  # Beyond the grace, until agents are cancelled at the engine, which has as long
REPORT_TIMEOUT = stretched(10.0)  # For the report, or the last card, of a run that has ended
TRACKERS_TIMEOUT = scaled(10.0)  # For all trackers after a run's end

# The channel: its two ends, in agents and the driver.
PING_INTERVAL = 1.0  # Between two signs of life of each end
CONNECTION_LOST_AFTER = stretched(45.0, least=13.5)  # Without a byte; after a cut of 20 s TCP resumes within 40
AGENT_CONNECT_TIMEOUT = stretched(20.0)  # For an agent to find a driver that proves the secret
CONNECT_TIMEOUT = stretched(5.0)  # For a name to be resolved, and for a connection to be made
HANDSHAKE_TIMEOUT = stretched(10.0)  # For both ends of a new connection to prove the secret
DELIVERY_INTERVAL = 0.5  # Between two deliveries of metrics, and of lines of a rank that prints little

# Agents, and the driver that waits for them.
CAUSE_WINDOW = stretched(2.0)  # For the first cause of failures that may be consequences, or of a lost agent
STACKS_TIMEOUT = stretched(2.0)  # For workers to write their stacks
STACKS_WINDOW = stretched(5.0)  # For stacks to arrive once a run counts as hung
WORKER_EXIT_MARGIN = stretched(4.0)  # To exit for a rank whose exit_timeout is over
STOPPED_LINES_TIMEOUT = stretched(1.5)  # To deliver the last lines after a failure or a cancel
LAST_LINES_TIMEOUT = stretched(600.0)  # To deliver them after a success
LAST_LINES_STALL_TIMEOUT = stretched(15.0)  # Without an accepted one of them, until they are dropped
SUCCESS_END_TIMEOUT = stretched(25.0)  # Without a message, until agents are cancelled after a success
CHECKPOINT_COMMIT_TIMEOUT = scaled(600.0)  # For checkpoints at a run's end, and for a rank that waits for one
WAITING_INTERVAL = scaled(30.0)  # Between two messages about what an attempt waits for
PROGRESS_LINE_INTERVAL = scaled(5.0)  # Between two progress lines in a log

# Polls of what cannot wake the process that waits for it: the longer it usually takes, the longer the interval.
POLL_INTERVAL_BRIEF = 0.02  # A lock
POLL_INTERVAL_SHORT = 0.05  # A file
POLL_INTERVAL = 0.1  # A directory, or a full window
POLL_INTERVAL_LONG = 0.5  # Ranks and slots
POLL_INTERVAL_LONGEST = 1.0  # A server that starts, or an owner
