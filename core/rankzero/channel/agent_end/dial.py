"""Connects an agent to its driver, with a proof of the run's secret in both directions.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.channel import auth, frames
from rankzero.channel.auth import Handshake, Hello
from rankzero.channel.frames import Decoder, FrameError, Message, Sealer
from rankzero.channel.sockets import Wait, tune

if TYPE_CHECKING:
    from rankzero.channel.tls import TlsSocket

Address = tuple[int, Any]
"""Family and address of a socket."""


class RefusedError(ConnectionError):
    """The driver has proved the secret and refuses this agent."""


@dataclass
class Link:
    """A connection on which both ends have proved the secret."""

    socket: socket.socket | TlsSocket
    decoder: Decoder
    sealer: Sealer
    received: int
    """Number of this agent's frames that the driver has received."""


def addresses(host: str, port: int) -> list[Address]:
    """Returns every address of a host, IPv4 and IPv6. Raises OSError if its name does not resolve."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no host name: {error}") from None
    return [(info[0], info[4]) for info in infos]


def dial(address: Address, secret: str, hello: Hello, wait: Wait, certificate: bytes | None = None) -> Link:
    """Connects to one address and performs the handshake.

    Args:
        address: An address that may be the driver's.
        secret: The run's secret, hex.
        hello: The facts that the agent reports about itself.
        wait: Waits for the socket.
        certificate: The driver's certificate for an encrypted connection; None for a plain one.

    Raises:
        RefusedError: The driver refuses this agent.
        OSError: The address cannot be reached in time, or the connection was closed.
        FrameError: The process at that address is not the driver.
    """
    plain = socket.socket(address[0], socket.SOCK_STREAM)
    connection: socket.socket | TlsSocket = plain
    try:
        plain.setblocking(False)
        _connect(plain, address[1], wait)
        tune(plain)
        if certificate is not None:
            # Imported here, because loading the TLS library takes time that plain connections need not spend.
            from rankzero.channel.tls import encrypt

            connection = encrypt(plain, certificate, wait)
        return _shake_hands(connection, secret, hello, wait)
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, address: Any, wait: Wait) -> None:
    problem = connection.connect_ex(address)
    if problem == errno.EINPROGRESS:
        wait(connection, selectors.EVENT_WRITE, time.monotonic() + bounds.CONNECT_TRY_TIMEOUT)
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def _shake_hands(connection: socket.socket | TlsSocket, secret: str, hello: Hello, wait: Wait) -> Link:
    deadline = time.monotonic() + bounds.HANDSHAKE_REPLY_TIMEOUT
    decoder = Decoder()

    def receive() -> Message:
        while (body := decoder.next_body()) is None:
            wait(connection, selectors.EVENT_READ, deadline)
            try:
                data = connection.recv(frames.MAX_HANDSHAKE_FRAME)
            except BlockingIOError:
                # Only a part of an encrypted record has arrived.
                continue
            if not data:
                raise ConnectionResetError("the connection was closed during the handshake")
            decoder.feed(data)
        return frames.parse(body[1:])

    challenge = receive()
    if challenge["type"] != "challenge":
        raise FrameError("the peer did not send a challenge")
    handshake = Handshake(secret, challenge.get("nonce"), auth.new_nonce())
    # The buffer of a new socket has room for the whole frame.
    connection.sendall(frames.pack(b"J" + frames.dump(handshake.answer(hello))))
    verdict = receive()
    handshake.check_verdict(verdict)
    if verdict["type"] == "refused":
        raise RefusedError(verdict["reason"])
    ours, theirs = handshake.sealers()
    decoder.trust(theirs)
    return Link(connection, decoder, ours, verdict["received"])
