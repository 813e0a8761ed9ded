"""The driver's side of TLS: a certificate made for one attempt, and records without a socket.

The ``openssl`` command makes the certificate in a hundredth of a second, because the standard library makes none, and
TLS with pre-shared keys needs Python 3.13. Agents get the certificate together with the secret, by which they in turn
prove themselves.
"""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from dataclasses import dataclass, field

from rankzero import bounds
from rankzero.channel import limits
from rankzero.channel.frames import FrameError
from rankzero.errors import EngineError

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
                timeout=bounds.CERTIFICATE_TIMEOUT,
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
            while piece := self._tls.read(limits.READ_SIZE):
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
