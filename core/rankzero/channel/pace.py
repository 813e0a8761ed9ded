"""When messages that may wait a little leave: at the same moments in every process of a host.

Each delivery wakes the agent, the channel and the driver; what leaves together wakes them once. What comes after a
quiet time leaves at once, and what cannot wait takes along what does.
"""

from __future__ import annotations

import time

DELIVERY_INTERVAL = 0.5
"""Seconds between two deliveries of what may wait: metrics, and the lines of a rank that prints little."""


def next_delivery() -> float:
    """The next of these moments, as `time.monotonic` counts them: its clock is the host's, not the process's."""
    return (time.monotonic() // DELIVERY_INTERVAL + 1) * DELIVERY_INTERVAL
