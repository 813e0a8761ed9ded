"""Every bound of the channel in one place: times in seconds, sizes in bytes.

Both ends read them when they need them, so a test may make them small. Standard library only:
this module travels to executors.
"""

PING_INTERVAL = 1.0
"""Each end reports at least this often that it is alive, with what it has received so far."""

SILENCE = 5.0
"""A connection on which nothing was heard for so long is broken; the agent makes a new one at once."""

LOST_AFTER = 15.0
"""After so long without a word the other end is lost for good."""

CONNECT_TIMEOUT = 20.0
"""Time an agent has from its start to find a driver that proves the secret, unless it was given another."""

TRY_TIMEOUT = 2.0
"""Time for one connection to be made, on the agent's side."""

ANSWER_TIMEOUT = 5.0
"""Time for the handshake, on the agent's side: a driver whose agents all come at once takes one after the other, and
those who gave up and came again would only make the queue longer."""

BACKOFF_MIN = 0.1
"""First pause between two tries to connect; it doubles."""

BACKOFF_MAX = 1.0
"""Longest pause between two tries; a connection that lived longer starts over without one."""

HANDSHAKE_TIMEOUT = 10.0
"""Time a new connection has to prove the secret to the driver."""

MAX_UNPROVED = 256
"""Connections that have not proved the secret and are held at once; above, the oldest goes."""

UNPROVED_GRACE = 1.0
"""An unproved connection is not made to go before this age: many agents may come at once, and
the next ones wait in the listener's queue meanwhile."""

ACCEPT_RETRY = 0.1
"""Pause before the next accept when the process has no descriptor left."""

BACKLOG = 1024
"""Connections that may wait in the listener's queue."""

BULK_WINDOW = 8 << 20
"""Log and file bytes of one agent that are sent and not yet accepted by the driver."""

FETCH_WINDOW = 2 << 20
"""File bytes to one agent that are sent and not yet accepted by it: smaller, since the driver holds
as much for each of its agents."""

ACK_EVERY = 1 << 20
"""Bytes received, or given credit for, after which they are reported to the other end without waiting for a ping."""

TAKE_INTERVAL = 0.05
"""How soon the server looks again whether a busy driver can take more bulk."""

WRITE_AHEAD = 256 << 10
"""Sealed bytes that wait for the socket; what is sealed can no longer be overtaken."""

READ_SIZE = 256 << 10
"""Bytes taken from a socket at a time."""

FAREWELL_TIMEOUT = 1.0
"""Time the agents have to take the server's farewell when it closes."""

CLOSE_TIMEOUT = 5.0
"""Time to end the server's thread."""

FILE_THREADS = 32
"""Threads that read offered files and write uploads: a slow store holds one, not the loop."""

JOIN_TIMEOUT = 0.5
"""Time beyond its timeout that an agent's `close` waits for the thread, which may hang in a name lookup."""
