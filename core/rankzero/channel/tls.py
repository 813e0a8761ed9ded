"""TLS of the channel: a certificate made for one attempt, the driver's records without a socket, the agent's socket.

The ``openssl`` command makes the certificate in a hundredth of a second, because the standard library makes none, and
TLS with pre-shared keys needs Python 3.13. Agents get the certificate together with the secret, by which they in turn
prove themselves, and trust only this certificate. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass, field

from rankzero import bounds
from rankzero.channel import frames
from rankzero.channel.frames import FrameError
from rankzero.errors import EngineError
from rankzero.host.network import Wait

CERTIFICATE_TIMEOUT = bounds.stretched(30.0)  # For the openssl command

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_COMMAND = ("openssl", "req", "-x509", *_CURVE, "-nodes", "-days", "3650", "-subj", "/CN=rankzero")


@dataclass(frozen=True)
class Identity:
    """A certificate and its key.

    Attributes:
        certificate: The certificate as DER, for the agents.
        context: Context of the connections that show it.
    """

    certificate: bytes
    context: ssl.SSLContext = field(repr=False)


def make_identity() -> Identity:
    """Returns a new key with a self-signed certificate. The key's file exists only during this call.

    Raises:
        EngineError: the openssl command is missing or fails.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix="rankzero-") as key:
            # Only this user can read the file of the key.
            made = subprocess.run(
                [*_COMMAND, "-keyout", key.name],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=CERTIFICATE_TIMEOUT(),
                check=True,
            )
            certificate = ssl.PEM_cert_to_DER_cert(made.stdout.decode())
            with tempfile.NamedTemporaryFile(prefix="rankzero-") as shown:
                shown.write(made.stdout)
                shown.flush()
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(shown.name, key.name)
    except FileNotFoundError:
        raise EngineError(
            "encrypt needs the openssl command where the driver runs, to make the run's certificate: install openssl, "
            "or pass encrypt=False on a network that you trust"
        ) from None
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        words = getattr(error, "stderr", b"") or str(error).encode()
        raise EngineError(f"openssl made no certificate: {words.decode(errors='replace').strip()[-300:]}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Agents do not resume TLS sessions: each connection has its own handshake.
    context.num_tickets = 0
    return Identity(certificate, context)


class Records:
    """Translates between TLS records and their content, without I/O."""

    def __init__(self, identity: Identity) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = identity.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._waiting = bytearray()
        self._is_open = False

    def feed(self, data: bytes) -> bytes:
        """Returns the content of received records. The caller must then send `outgoing`.

        Raises:
            FrameError: the bytes are no TLS, or were tampered with.
        """
        self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
                if self._waiting:
                    self._tls.write(self._waiting)
                    self._waiting.clear()
            while piece := self._tls.read(frames.READ_SIZE):
                pieces.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise FrameError(f"the connection is not encrypted as it should be: {error.reason or error}") from None
        return b"".join(pieces)

    def write(self, data: bytes) -> None:
        """Encrypts data; before the end of the handshake it only stores them."""
        if self._is_open:
            self._tls.write(data)
        else:
            self._waiting += data

    def outgoing(self) -> bytes:
        """Returns the bytes that must be sent now."""
        return self._outgoing.read()


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
    deadline = time.monotonic() + bounds.HANDSHAKE_REPLY_TIMEOUT()
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
