"""Mutual proof of the run's secret by HMAC challenge; the secret itself never crosses.

    driver -> agent  challenge {nonce}
    agent  -> driver answer    {nonce, task, session, number, received, resume, proof}
    driver -> agent  welcome   {received, proof}   or   refused {reason, proof}

``received`` is how many of the other end's numbered frames have arrived in this session. ``number``
counts the agent's tries to connect, so that a delayed answer cannot replace a later one. A
proof covers every field beside it. Both sides derive the key for frame MACs from the secret and both
nonces, so every connection has its own. HMAC-SHA256, RFC 2104. Standard library only: this module
travels to executors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass

from rankzero.channel.frames import FrameError, Message, Sealer

TO_DRIVER = b"agent->driver"
TO_AGENT = b"driver->agent"

_MAX_TEXT = 128


def new_secret() -> str:
    """Returns a new secret for one run, as hex."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """Returns a new nonce for one handshake, or the name of one session, as hex."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Hello:
    """The facts that an agent reports about itself in its answer."""

    task: int
    """Number of its task."""
    session: str
    """Random name of its session, the same for every connection of one client."""
    number: int
    """Number of times that this client has tried to connect."""
    received: int
    """Number of the driver's frames that it has received."""
    resume: bool
    """True if the driver has welcomed this session before."""

    @classmethod
    def parse(cls, answer: Message) -> Hello:
        """Reads and checks the fields. Raises FrameError."""
        numbers = [answer.get(name) for name in ("task", "number", "received")]
        session, resume = answer.get("session"), answer.get("resume")
        if (
            answer["type"] != "answer"
            or any(type(value) is not int or not 0 <= value < 1 << 63 for value in numbers)
            or not _is_text(session)
            or not isinstance(resume, bool)
        ):
            raise FrameError("the answer to the challenge is malformed")
        return cls(answer["task"], answer["session"], answer["number"], answer["received"], resume)


class Handshake:
    """The proofs and keys of one connection, once both nonces are known."""

    def __init__(self, secret: str, driver_nonce: object, agent_nonce: object) -> None:
        if not _is_text(driver_nonce) or not _is_text(agent_nonce):
            raise FrameError("a nonce is malformed")
        self._secret = bytes.fromhex(secret)
        self._nonces = (driver_nonce, agent_nonce)

    def _hmac(self, *parts: object) -> bytes:
        return hmac.new(self._secret, json.dumps([*parts, *self._nonces]).encode(), hashlib.sha256).digest()

    def answer(self, hello: Hello) -> Message:
        """Returns the message by which the agent proves the secret."""
        nonce = self._nonces[1]
        return {"type": "answer", **asdict(hello), "nonce": nonce, "proof": self._answer_proof(hello)}

    def check_answer(self, hello: Hello, answer: Message) -> None:
        """Raises FrameError unless the agent has proved the secret."""
        _check(self._answer_proof(hello), answer)

    def _answer_proof(self, hello: Hello) -> str:
        return self._hmac("answer", asdict(hello)).hex()

    def welcome(self, received: int) -> Message:
        """Returns the message by which the driver proves the secret."""
        return {"type": "welcome", "received": received, "proof": self._hmac("welcome", received).hex()}

    def refused(self, reason: str) -> Message:
        """Returns the message by which the driver refuses an agent."""
        return {"type": "refused", "reason": reason, "proof": self._hmac("refused", reason).hex()}

    def check_verdict(self, verdict: Message) -> None:
        """Raises FrameError unless the driver has proved the secret in its welcome or refusal."""
        kind, received, reason = verdict["type"], verdict.get("received"), verdict.get("reason")
        if kind == "welcome" and type(received) is int and received >= 0:
            _check(self._hmac("welcome", received).hex(), verdict)
        elif kind == "refused" and isinstance(reason, str):
            _check(self._hmac("refused", reason).hex(), verdict)
        else:
            raise FrameError("the peer neither welcomed nor refused")

    def sealers(self) -> tuple[Sealer, Sealer]:
        """Returns the sealers of the connection: agent to driver, driver to agent."""
        key = self._hmac("frames")
        return Sealer(key, TO_DRIVER), Sealer(key, TO_AGENT)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isascii()


def _check(expected: str, message: Message) -> None:
    given = message.get("proof")
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(expected, given):
        raise FrameError("the peer did not prove the run's secret")
