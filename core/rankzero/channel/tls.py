"""TLS of the channel: a certificate that is made for one attempt.

The ``openssl`` command makes the certificate in a hundredth of a second, because the standard library makes none, and
TLS with pre-shared keys needs Python 3.13. Agents get the certificate together with the secret, by which they in turn
prove themselves, and trust only this certificate. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from dataclasses import dataclass, field

from rankzero import bounds
from rankzero.errors import EngineError

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


def client_context() -> ssl.SSLContext:
    """Returns the context of an agent, which itself compares the certificate with the driver's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
