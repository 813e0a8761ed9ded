"""TLS as an agent speaks it: to the very certificate that its run was given, and to no other.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time

from rankzero.channel import limits
from rankzero.channel.frames import FrameError
from rankzero.channel.sockets import Wait


class TlsSocket:
    """An encrypted connection, used like a plain socket that does not block."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._connection.fileno()

    def recv(self, size: int) -> bytes:
        """What has arrived, whole records, so that nothing is left where no selector looks.

        Raises:
            BlockingIOError: nothing has.
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
        """As a socket's. After BlockingIOError the next call must begin with the same bytes."""
        try:
            return self._connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendall(self, data: bytes) -> None:
        """For what a fresh connection's buffer takes whole."""
        self._connection.sendall(data)

    def close(self) -> None:
        """Closes at once."""
        self._connection.close()


def encrypt(connection: socket.socket, certificate: bytes, wait: Wait) -> TlsSocket:
    """The connection, encrypted, once its other end has shown this certificate and that it has its key.

    The certificate is its own proof: neither a name nor a clock counts.

    Args:
        connection: Connected, and without blocking. Belongs to the result; closed if this raises.
        certificate: DER.
        wait: Waits for the socket.

    Raises:
        FrameError: another certificate.
        OSError: no handshake in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    encrypted = context.wrap_socket(connection, do_handshake_on_connect=False)
    deadline = time.monotonic() + limits.ANSWER_TIMEOUT
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
            raise FrameError("whoever answered has another certificate than the run's")
    except BaseException:
        encrypted.close()
        raise
    return TlsSocket(encrypted)
