"""Bounds that several processes share. What only one of them waits for has its name there."""

from __future__ import annotations

STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when a run fails or is cancelled, unless the job says otherwise."""

EXIT_TIMEOUT = 5.0
"""Seconds that exit handlers and threads of a rank get after it has returned, unless the job says otherwise."""

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats in ``status.json``."""

DRIVER_DEAD_AFTER = 15.0
"""Seconds without a heartbeat after which a driver counts as dead; more where it writes seldom."""

DRIVER_STALE_AFTER = 120.0
"""Seconds without a heartbeat after which it counts more than a process that is still there, for a driver in a thread
on a system that cannot be queried for threads (macOS)."""

CLOCK_SKEW = 300.0
"""Seconds by which the clocks of two hosts may differ."""

STORE_OUTAGE = 300.0
"""Seconds of an outage of the store that the end of a training outlasts: its result is worth more than the wait."""

LOG_TAIL = 20
"""Log lines of a rank that are kept for an error message."""

LOG_TAIL_WIDTH = 2000
"""Characters of each of them."""

CANCEL_TIMEOUT = 25.0
"""Seconds to wait for the end of a run that was cancelled."""

RETURNED_NOTICE = 30.0
"""Seconds without progress, after some ranks have returned, until a line of the log says where the others are."""

RETURNED_HANG = 300.0
"""Seconds for which the others may wait in a collective for ranks that have returned, whatever ``hang_timeout`` is."""

MEET_TIMEOUT = 30.0
"""Seconds for a rank to reach rank 0's rendezvous."""

VALUE_LIMIT = 16 << 20
"""Bytes of a result that an orchestrator's metadata database gets where its other tasks are mapped over the items."""

UNFINISHED_AFTER = 3600.0
"""Seconds since its last change after which a file under a temporary name counts as left by a killed process."""
