"""TLS of the channel: a certificate that is made for one attempt.

The ``openssl`` command makes the certificate in a hundredth of a second, because the standard library makes none, and
TLS with pre-shared keys needs Python 3.13. Agents get the certificate together with the secret, by which they in turn
prove themselves, and trust only this certificate. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import ssl
import subprocess
import tempfile

from rankzero import bounds
from rankzero.errors import EngineError

CERTIFICATE_TIMEOUT = bounds.stretched(30.0)  # For the openssl command

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_COMMAND = ("openssl", "req", "-x509", *_CURVE, "-nodes", "-days", "3650", "-subj", "/CN=rankzero")


def make_identity() -> tuple[bytes, ssl.SSLContext]:
    """Returns a new self-signed certificate as DER, for the agents, and the context of connections that show it.

    The file of its key exists only during this call, and only this user can read it.

    Raises:
        EngineError: the openssl command is missing or fails.
    """
    try:
        with tempfile.NamedTemporaryFile("w+", prefix="rankzero-") as key:
            command, timeout = [*_COMMAND, "-keyout", key.name], CERTIFICATE_TIMEOUT()
            made = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, check=True
            )
            # A file with both, which the context reads.
            with open(key.name, "a") as file:
                file.write(made.stdout)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(key.name)
            certificate = ssl.PEM_cert_to_DER_cert(made.stdout)
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        words = str(getattr(error, "stderr", None) or error).strip()[-300:]
        raise EngineError(
            "encrypt needs the openssl command where the driver runs, to make the run's certificate: install openssl, "
            f"or pass encrypt=False on a network that you trust. It made none: {words}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Agents do not resume TLS sessions: each connection has its own handshake.
    context.num_tickets = 0
    return certificate, context


def client_context() -> ssl.SSLContext:
    """Returns the context of an agent, which itself compares the certificate with the driver's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
