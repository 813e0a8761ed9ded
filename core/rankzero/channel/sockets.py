"""The sockets of the channel: how the driver listens, and the options of connected sockets."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.channel import limits

Wait = Callable[[Any, int, float], None]
"""Waits until a socket is ready for a selector's event, or raises TimeoutError at a monotonic time."""

_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def listen(host: str, ports: Sequence[int] | None) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: Address or name, IPv4 or IPv6; ``"::"`` takes IPv4 too.
        ports: First and last port to try, or None for any free one.

    Raises:
        OSError: No port of the range is free, or the host is not an address of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Ports of a range are reused soon, and lingering connections of the last run do no harm.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                listener.bind((address[0], port, *address[2:]))
                listener.listen(limits.BACKLOG)
            except OSError as error:
                if error.errno in _TAKEN:
                    continue
                raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
            listener.setblocking(False)
            stack.pop_all()
            return listener
    raise OSError(
        errno.EADDRINUSE, f"none of the ports {first} to {last} on {host} is free; free one or give a wider range"
    )


def tune(connection: socket.socket) -> None:
    """Sends small frames immediately, and detects a dead peer even when nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
