"""Every time limit (in seconds) and size limit of the channel.

Both ends read them when they use them, so tests may lower them. Standard library only: this module travels to
executors.
"""

PING_INTERVAL = 1.0
"""Longest time between two frames of each end, which also report how many frames have arrived."""

SILENCE = 5.0
"""Time without a frame after which a connection is broken; the agent then makes a new one immediately."""

LOST_AFTER = 15.0
"""Time without a frame after which the other end is lost for good."""

CONNECT_TIMEOUT = 20.0
"""Time from its start that an agent has to find a driver that proves the secret, unless it was given another."""

TRY_TIMEOUT = 2.0
"""Time for one connection to be made, on the agent's side."""

ANSWER_TIMEOUT = 5.0
"""Time for the handshake, on the agent's side. It is long because a driver serves agents that connect together one
after the other, and agents that give up and come again would only lengthen the queue."""

BACKOFF_MIN = 0.1
"""First pause between two tries to connect; each pause is twice as long as the one before."""

BACKOFF_MAX = 1.0
"""Longest pause between two tries; after a connection that lived longer, the first try has no pause."""

HANDSHAKE_TIMEOUT = 10.0
"""Time that a new connection has to prove the secret to the driver."""

MAX_UNPROVED = 256
"""Most connections that have not proved the secret; the oldest is closed for a new one."""

UNPROVED_GRACE = 1.0
"""Age before which an unproved connection is not closed for a new one, because many agents may connect together; new
ones wait in the listener's queue meanwhile."""

ACCEPT_RETRY = 0.1
"""Pause before the next accept when the process has no descriptor left."""

BACKLOG = 1024
"""Connections that may wait in the listener's queue."""

BULK_WINDOW = 8 << 20
"""Log and file bytes of one agent that may be sent before the driver has accepted them."""

FETCH_WINDOW = 2 << 20
"""File bytes to one agent that may be sent before the agent has accepted them. Smaller, because the driver keeps as
many for each of its agents."""

ACK_EVERY = 1 << 20
"""Bytes received, or given credit for, after which the counts are sent without waiting for a ping."""

TAKE_INTERVAL = 0.05
"""Time between two checks whether a busy driver can take more bulk."""

WRITE_AHEAD = 256 << 10
"""Sealed bytes that may wait for the socket; a sealed frame can no longer be overtaken."""

READ_SIZE = 256 << 10
"""Most bytes that are read from a socket in one call."""

DISCONNECT_TIMEOUT = 1.0
"""Time that agents have to receive the server's disconnect when it closes."""

CLOSE_TIMEOUT = 5.0
"""Time that the server's thread has to end."""

FILE_THREADS = 32
"""Threads that read offered files and write uploads, so that a slow store blocks one of them and not the loop."""

JOIN_TIMEOUT = 0.5
"""Time beyond its timeout that an agent's `close` waits for the thread, which may hang in a name lookup."""
