"""`Connection`: one socket of the server, with a handshake first, then sealed frames for a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol, cast

from rankzero.channel import auth, frames, limits
from rankzero.channel.auth import Handshake, Hello
from rankzero.channel.driver_end.peer import Peer
from rankzero.channel.frames import Decoder, FrameError, Sealer
from rankzero.channel.session import Session
from rankzero.channel.sockets import tune
from rankzero.channel.tls import Identity, Records

logger = logging.getLogger(__name__)


class Reception(Protocol):
    """The methods of the server that a connection calls."""

    def on_made(self, connection: Connection) -> None:
        """Registers a new connection, which has not proved the secret."""

    def admit(self, connection: Connection, hello: Hello) -> Peer | str:
        """Assigns a connection that has proved the secret to its agent, or returns the reason for a refusal."""

    def lose(self, peer: Peer, reason: str) -> None:
        """Gives an agent up as lost."""

    def on_end(self, connection: Connection) -> None:
        """Removes a closed connection."""


class Connection(asyncio.Protocol):
    """A connection that belongs to no agent until it has proved the secret."""

    def __init__(self, server: Reception, secret: str, identity: Identity | None = None) -> None:
        self._server = server
        self._records = Records(identity) if identity else None
        self._secret = secret
        self._nonce = auth.new_nonce()
        self._decoder = Decoder()
        self._sealer: Sealer | None = None
        self._is_full = False
        self._is_closed = False
        self.made = time.monotonic()
        self.peer: Peer | None = None
        self.reason = "the connection ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the challenge to the other end."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=limits.WRITE_AHEAD)
        with contextlib.suppress(OSError):
            tune(self._transport.get_extra_info("socket"))
        self._server.on_made(self)
        self._write(frames.pack(b"J" + frames.dump({"type": "challenge", "nonce": self._nonce})))

    def data_received(self, data: bytes) -> None:
        """Handles every complete frame, then sends what is due."""
        if self.peer is not None:
            self.peer.received_at = time.monotonic()
        try:
            self._decoder.feed(self._opened(data))
        except FrameError as error:
            self.drop(str(error))
            return
        while not self._is_closed:
            try:
                body = self._decoder.next_body()
                if body is None:
                    break
                if self.peer is None:
                    self._prove(body)
                    continue
            except FrameError as error:
                self.drop(str(error))
                return
            try:
                self.peer.take(body)
            except FrameError as error:
                # The agent itself sent this frame, and would send it again on the next connection.
                self._server.lose(self.peer, f"agent {self.peer.task} broke the channel's rules: {error}")
                return
        if self.peer is not None:
            self.peer.pump()

    def _opened(self, data: bytes) -> bytes:
        if self._records is None:
            return data
        try:
            return self._records.feed(data)
        finally:
            self._transport.write(self._records.outgoing())

    def _write(self, data: bytes) -> None:
        if self._records is None:
            self._transport.write(data)
            return
        self._records.write(data)
        self._transport.write(self._records.outgoing())

    def _prove(self, body: bytes) -> None:
        answer = frames.parse(body[1:])
        hello = Hello.parse(answer)
        handshake = Handshake(self._secret, self._nonce, answer.get("nonce"))
        handshake.check_answer(hello, answer)
        verdict = self._server.admit(self, hello)
        if isinstance(verdict, str):
            self.reason = verdict
            self._write(frames.pack(b"J" + frames.dump(handshake.refused(verdict))))
            self.close()
            return
        self._write(frames.pack(b"J" + frames.dump(handshake.welcome(verdict.session.received))))
        theirs, self._sealer = handshake.sealers()
        self._decoder.trust(theirs)
        self.peer = verdict

    def send(self, session: Session) -> None:
        """Seals and writes the session's next frames, as far as the socket takes them."""
        while self._sealer is not None and not (self._is_full or self._is_closed):
            batch, size = [], 0
            while size < limits.WRITE_AHEAD and (body := session.next()) is not None:
                batch.append(frames.pack(body, self._sealer))
                size += len(body)
            if not batch:
                return
            self._write(b"".join(batch))

    def pause_writing(self) -> None:
        """Stops writing, because the socket is full."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Continues to write, because the socket has room again."""
        self._is_full = False
        if self.peer is not None:
            self.peer.pump()

    def eof_received(self) -> None:
        """Closes the connection, because the other end has closed it."""

    def connection_lost(self, error: Exception | None) -> None:
        """Records that the socket is closed, by either end."""
        self._is_closed = True
        if error is not None:
            self.reason = str(error)
        self._server.on_end(self)

    def close(self) -> None:
        """Closes the socket after all written bytes have been sent."""
        self._is_closed = True
        self._transport.close()

    def drop(self, reason: str) -> None:
        """Closes the socket immediately."""
        level = logging.WARNING if self.peer is None else logging.DEBUG
        logger.log(level, "channel: dropped a connection: %s", reason)
        self.reason = reason
        self._is_closed = True
        self._transport.abort()
