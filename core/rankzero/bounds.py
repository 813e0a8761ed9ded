"""Time limits in seconds, by the process in which they hold, and sizes that several modules share.

Limits of different processes hold in relation to each other; `tests/test_bounds.py` has these relations. A size that
one module uses is defined there. Modules read a limit when they use it, so tests may change it. This module imports
nothing, since every process loads it.
"""

from __future__ import annotations

STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when a run fails or is cancelled, unless the job has another value."""

EXIT_TIMEOUT = 5.0
"""Seconds that exit handlers and threads of a rank get after it has returned, unless the job has another value."""

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats in ``status.json``."""

DRIVER_DEAD_AFTER = 15.0
"""Seconds without a heartbeat after which a driver counts as dead; more if its heartbeat interval is longer."""

DRIVER_STALE_AFTER = 120.0
"""Seconds without a heartbeat after which a driver in a thread counts as dead although its process is alive, on systems
that cannot be queried for threads (macOS)."""

CLOCK_SKEW = 300.0
"""Most seconds by which the clocks of two hosts may differ."""

STORE_OUTAGE = 300.0
"""Seconds of retries while the store fails at the end of a training: its result is worth more than the wait."""

LOG_TAIL = 20
"""Last log lines of a rank that are kept for an error message."""

LOG_TAIL_WIDTH = 2000
"""Characters to which each of these lines is cut."""

CANCEL_TIMEOUT = 25.0
"""Seconds to wait for the end of a cancelled run, in addition to its ``stop_grace``."""

RETURNED_NOTICE = 30.0
"""Seconds without progress, after some ranks have returned, until a log line says what the others are doing."""

RETURNED_HANG = 300.0
"""Seconds that ranks may wait in a collective for ranks that have returned, whatever ``hang_timeout`` is."""

MEET_TIMEOUT = 30.0
"""Seconds for a rank to connect to rank 0's rendezvous."""

VALUE_LIMIT = 16 << 20
"""Bytes of a result that an orchestrator's metadata database gets where its other tasks are mapped over the items."""

UNFINISHED_AFTER = 3600.0
"""Seconds since its last change after which a temporary file counts as left by a killed process."""


# The channel: its two ends, in agents and the driver.

PING_INTERVAL = 1.0
"""Longest time between two frames of each end, which also report how many frames have arrived."""

CONNECTION_SILENCE = 5.0
"""Time without a frame after which a connection is broken; the agent then makes a new one immediately."""

CONNECTION_LOST_AFTER = 15.0
"""Time without a frame after which the other end is lost for good."""

AGENT_CONNECT_TIMEOUT = 20.0
"""Time from its start that an agent has to find a driver that proves the secret, unless it was given another."""

CONNECT_TRY_TIMEOUT = 2.0
"""Time for one connection to be made, on the agent's side."""

HANDSHAKE_REPLY_TIMEOUT = 5.0
"""Time for the handshake, on the agent's side. It is long because a driver serves agents that connect together one
after the other, and agents that give up and come again would only lengthen the queue."""

CONNECT_PAUSE_MIN = 0.1
"""First pause between two tries to connect; each pause is twice as long as the one before."""

CONNECT_PAUSE_MAX = 1.0
"""Longest pause between two tries; after a connection that lived longer, the first try has no pause."""

HANDSHAKE_TIMEOUT = 10.0
"""Time that a new connection has to prove the secret to the driver."""

UNPROVED_GRACE = 1.0
"""Age before which an unproved connection is not closed for a new one, because many agents may connect together; new
ones wait in the listener's queue meanwhile."""

ACCEPT_RETRY_INTERVAL = 0.1
"""Pause before the next accept when the process has no descriptor left."""

BULK_POLL_INTERVAL = 0.05
"""Time between two checks whether a busy driver can take more bulk."""

DISCONNECT_TIMEOUT = 1.0
"""Time that agents have to receive the server's disconnect when it closes."""

CHANNEL_CLOSE_TIMEOUT = 5.0
"""Time that the server's thread has to end."""

CHANNEL_JOIN_MARGIN = 0.5
"""Time beyond its timeout that an agent's `close` waits for the thread, which may hang in a name lookup."""

CERTIFICATE_TIMEOUT = 30.0
"""Seconds for the openssl command."""

DELIVERY_INTERVAL = 0.5
"""Seconds between two deliveries of messages that may wait: metrics, and the lines of a rank that prints little."""
