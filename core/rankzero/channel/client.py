"""The agent's end of the channel: a blocking handshake, then non-blocking frames.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator

from rankzero.channel import auth, frames
from rankzero.channel.frames import Decoder, FrameError, Message

CONNECT_TIMEOUT = 20.0
"""Seconds to reach the driver and finish the handshake."""

_RECEIVE = 1 << 18


class ChannelClosed(ConnectionError):
    """The driver closed the connection or is gone."""


class ChannelClient:
    """A connection to the driver. After `connect` the socket is non-blocking."""

    def __init__(self, address: tuple[str, int], secret: str, task: int) -> None:
        self._address = address
        self._secret = secret
        self._task = task
        self._decoder = Decoder()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._sealer: frames.Sealer | None = None
        self.socket: socket.socket

    def connect(self) -> None:
        """Connects and proves the secret. Raises ConnectionError, TimeoutError or FrameError."""
        self.socket = socket.create_connection(self._address, timeout=CONNECT_TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        challenge = self._receive_one("challenge")
        driver_nonce, agent_nonce = str(challenge["nonce"]), auth.new_nonce()

        def proof(side: bytes) -> str:
            return auth.proof(self._secret, side, driver_nonce, agent_nonce, self._task)

        answer = {"type": "answer", "task": self._task, "nonce": agent_nonce}
        self.socket.sendall(frames.encode({**answer, "proof": proof(auth.TO_DRIVER)}))
        auth.check(proof(auth.TO_AGENT), self._receive_one("welcome"))
        self._sealer, incoming = auth.sealers(self._secret, driver_nonce, agent_nonce)
        self._decoder.trust(incoming)
        self.socket.setblocking(False)

    def _receive_one(self, expected: str) -> Message:
        while True:
            for message in self._decoder:
                if not isinstance(message, dict) or message["type"] != expected:
                    raise FrameError(f"expected {expected!r} in the handshake")
                return message
            data = self.socket.recv(frames.MAX_HANDSHAKE_FRAME)
            if not data:
                raise ChannelClosed("the driver closed the connection during the handshake")
            self._decoder.feed(data)

    def queue(self, frame: Message | bytes) -> None:
        """Puts a frame in line; `flush` sends as much as the socket takes."""
        data = frames.encode(frame, self._sealer)
        self._unsent.append(memoryview(data))
        self.unsent_bytes += len(data)

    def flush(self) -> None:
        """Sends without blocking. Raises ChannelClosed when the driver is gone."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(f"the driver cannot be reached: {error}") from None
            self.unsent_bytes -= sent
            rest = self._unsent[0][sent:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()

    def receive(self) -> Iterator[Message | bytes]:
        """The frames that have arrived. Raises ChannelClosed at end of stream."""
        try:
            data = self.socket.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"the driver cannot be reached: {error}") from None
        if not data:
            raise ChannelClosed("the driver closed the connection")
        self._decoder.feed(data)
        yield from self._decoder

    def close(self) -> None:
        """Closes the socket; never raises."""
        with contextlib.suppress(OSError, AttributeError):
            self.socket.close()
