"""The moments at which messages that may wait are sent, which are the same in every process of a host.

Each delivery wakes the agent, the channel and the driver, so messages that are sent together wake them once. The first
message after a quiet time is sent immediately, and an urgent message takes waiting ones along.
"""

from __future__ import annotations

import time

from rankzero import bounds


def next_delivery() -> float:
    """Returns the next of these moments as `time.monotonic` time, which all processes of a host share."""
    return (time.monotonic() // bounds.DELIVERY_INTERVAL + 1) * bounds.DELIVERY_INTERVAL
