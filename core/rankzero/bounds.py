"""Time limits and sizes that several modules share. A limit that one module uses is defined there."""

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
