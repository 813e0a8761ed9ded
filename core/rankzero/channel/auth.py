"""Mutual proof of the run's secret by HMAC challenge; the secret itself never crosses.

    driver -> agent  challenge {nonce}
    agent  -> driver answer    {task, nonce, proof}
    driver -> agent  welcome   {proof}

Both sides then derive the key for frame MACs from the secret and both nonces, so every
connection has its own. HMAC-SHA256, RFC 2104.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from rankzero.channel.frames import FrameError, Message, Sealer

TO_DRIVER = b"agent->driver"
TO_AGENT = b"driver->agent"


def new_secret() -> str:
    """A fresh secret for one run, hex."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A fresh nonce for one handshake, hex."""
    return secrets.token_hex(16)


def _hmac(secret: str, *parts: str) -> bytes:
    return hmac.new(bytes.fromhex(secret), "|".join(parts).encode(), hashlib.sha256).digest()


def proof(secret: str, side: bytes, driver_nonce: str, agent_nonce: str, task: int) -> str:
    """What one side shows the other to prove that it knows the secret."""
    return _hmac(secret, "proof", side.decode(), driver_nonce, agent_nonce, str(task)).hex()


def check(expected: str, message: Message) -> None:
    """Raises FrameError unless the message carries the expected proof."""
    given = message.get("proof")
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(expected, given):
        raise FrameError("the peer did not prove the run's secret")


def sealers(secret: str, driver_nonce: str, agent_nonce: str) -> tuple[Sealer, Sealer]:
    """(agent to driver, driver to agent) sealers of one connection."""
    key = _hmac(secret, "frames", driver_nonce, agent_nonce)
    return Sealer(key, TO_DRIVER), Sealer(key, TO_AGENT)
