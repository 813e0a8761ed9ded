"""Every size limit of the channel; the time limits are in `rankzero.bounds`.

Both ends read them when they use them, so tests may lower them. Standard library only: this module travels to
executors.
"""

MAX_UNPROVED = 256
"""Most connections that have not proved the secret; the oldest is closed for a new one."""

BULK_WINDOW = 8 << 20
"""Log and file bytes of one agent that may be sent before the driver has accepted them."""

FETCH_WINDOW = 2 << 20
"""File bytes to one agent that may be sent before the agent has accepted them. Smaller, because the driver keeps as
many for each of its agents."""

ACK_EVERY = 1 << 20
"""Bytes received, or given credit for, after which the counts are sent without waiting for a ping."""

WRITE_AHEAD = 256 << 10
"""Sealed bytes that may wait for the socket; a sealed frame can no longer be overtaken."""

READ_SIZE = 256 << 10
"""Most bytes that are read from a socket in one call."""

FILE_THREADS = 32
"""Threads that read offered files and write uploads, so that a slow store blocks one of them and not the loop."""
