"""The agent's side of TLS, which trusts only the certificate of its run.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time

from rankzero import bounds
from rankzero.channel.frames import FrameError
from rankzero.channel.sockets import Wait


class TlsSocket:
    """An encrypted connection with the interface of a non-blocking socket."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Returns the descriptor to wait for."""
        return self._connection.fileno()

    def recv(self, size: int) -> bytes:
        """Returns the bytes that have arrived, in whole records: a selector does not see buffered bytes of a record.

        Raises:
            BlockingIOError: no bytes have arrived.
        """
        pieces: list[bytes] = []
        left = size
        while left > 0 or self._connection.pending():
            try:
                piece = self._connection.recv(max(left, self._connection.pending()))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            left -= len(piece)
        if not pieces:
            raise BlockingIOError
        return b"".join(pieces)

    def send(self, data: bytes | bytearray) -> int:
        """Sends like a socket. After BlockingIOError the next call must begin with the same bytes."""
        try:
            return self._connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendall(self, data: bytes) -> None:
        """Sends bytes that fit into the buffer of a new connection."""
        self._connection.sendall(data)

    def close(self) -> None:
        """Closes the connection immediately."""
        self._connection.close()


def encrypt(connection: socket.socket, certificate: bytes, wait: Wait) -> TlsSocket:
    """Returns the connection, encrypted, after its other end has shown this certificate and proved its key.

    Only the certificate itself is compared; its names and its dates are ignored.

    Args:
        connection: A connected, non-blocking socket. The result owns it; it is closed if this raises.
        certificate: The driver's certificate as DER.
        wait: Waits for the socket.

    Raises:
        FrameError: the other end has another certificate.
        OSError: the handshake did not end in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    encrypted = context.wrap_socket(connection, do_handshake_on_connect=False)
    deadline = time.monotonic() + bounds.HANDSHAKE_REPLY_TIMEOUT
    try:
        while True:
            try:
                encrypted.do_handshake()
                break
            except ssl.SSLWantReadError:
                wait(encrypted, selectors.EVENT_READ, deadline)
            except ssl.SSLWantWriteError:
                wait(encrypted, selectors.EVENT_WRITE, deadline)
        if encrypted.getpeercert(binary_form=True) != certificate:
            raise FrameError("the process at this address has another certificate than the run's")
    except BaseException:
        encrypted.close()
        raise
    return TlsSocket(encrypted)
