"""`Peer`: the driver's side of one agent's session, and `Connection`: a socket of the server, which it uses.

A connection begins with a handshake; sealed frames for its peer follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol, cast

from rankzero.channel import auth, frames
from rankzero.channel.auth import Handshake, Hello
from rankzero.channel.files import Uploads, read_offered
from rankzero.channel.frames import Decoder, FrameError, Message, Sealer
from rankzero.channel.session import (
    BULK,
    CONTENT,
    CONTROL,
    MADE_UP,
    OWN,
    Session,
    content_body,
    message_body,
    split_content,
)
from rankzero.channel.tls import Identity, Records
from rankzero.host.network import tune

logger = logging.getLogger(__name__)

OnMessage = Callable[[int, Message], None]


class Peer:
    """An agent: its session, its files, and whether it is connected."""

    def __init__(
        self,
        task: int,
        name: str,
        on_message: OnMessage,
        served: dict[str, str],
        upload_directory: str,
        grant: Callable[[Peer, int], None],
    ) -> None:
        """Starts a session without a connection.

        Args:
            task: The agent's number.
            name: The random name of its session.
            on_message: Receives the messages of the agent.
            served: Locations of the files that the agent may fetch, by name.
            upload_directory: Directory of its uploads.
            grant: Decides when the agent gets credit for accepted bulk bytes.
        """
        self.task = task
        self.name = name
        self.session = Session(frames.FETCH_WINDOW, frames.BULK_WINDOW)
        self.connection: Connection | None = None
        self.number = -1
        self.received_at = self.pinged = time.monotonic()
        self.has_left = False
        self.is_lost = False
        self.withheld = 0
        self._on_message = on_message
        self._served = served
        self._grant = grant
        self._uploads = Uploads(upload_directory, task, self.deliver, self._accept_content)
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()

    @property
    def is_live(self) -> bool:
        """True until the agent has disconnected or is lost."""
        return not (self.is_lost or self.has_left)

    def deliver(self, message: Message) -> None:
        """Delivers a message of the agent, or one that the channel synthesizes, to the driver."""
        try:
            self._on_message(self.task, message)
        except Exception:
            logger.exception("channel: the driver failed on a message %r of agent %d", message["type"], self.task)

    def queue(self, body: bytes) -> None:
        """Sends a control frame, now or when the agent is connected again."""
        self.session.queue(body)
        self.pump()

    def pump(self) -> None:
        """Sends the frames that may be sent now."""
        if self.connection is not None:
            self.connection.send(self.session)
            self._moved.set()

    def take(self, body: bytes) -> None:
        """Handles a frame. Raises FrameError if the agent broke the rules."""
        kind = self.session.take(body)
        if kind == CONTROL:
            self._take_message(body)
        elif kind == BULK:
            self._take_message(body)
            self._grant(self, len(body))
            # The next pump acknowledges it: an agent that is closing waits for exactly that.
            self.session.ping()
        elif kind == CONTENT:
            self._uploads.content(*split_content(body), len(body))
        elif kind == OWN:
            self._take_own(frames.parse(body[1:]))

    def _take_message(self, body: bytes) -> None:
        message = frames.parse(body[1:])
        if message["type"] in MADE_UP:
            raise FrameError(f"a message of the type {message['type']!r} from an agent")
        self.deliver(message)

    def _accept_content(self, size: int) -> None:
        self._grant(self, size)
        self.pump()

    def _take_own(self, message: Message) -> None:
        kind = message["type"]
        if kind == "upload":
            self._uploads.begin(message)
        elif kind == "upload-end":
            if isinstance(then := message.get("then"), dict) and then.get("type") in MADE_UP:
                raise FrameError(f"a message of the type {then['type']!r} from an agent")
            self._uploads.end(message)
        elif kind == "fetch":
            self._begin_fetch(message.get("stream"), message.get("name"))
        elif kind == "farewell":
            self.has_left = True
            self._uploads.when_idle(self.confirm_disconnect)
        else:
            raise FrameError(f"unknown message {kind!r} of the channel")

    def confirm_disconnect(self) -> None:
        """Confirms to the agent that the session has ended and everything has arrived."""
        self.session.ping()
        self.queue(message_body(OWN, {"type": "farewell"}))

    def _begin_fetch(self, stream: object, name: object) -> None:
        if type(stream) is not int or not 0 < stream < 1 << 32 or stream in self._fetches or not isinstance(name, str):
            raise FrameError("a malformed request for a file")
        self._fetches[stream] = asyncio.get_running_loop().create_task(self._fetch(stream, name))

    async def _fetch(self, stream: int, name: str) -> None:
        async def put(chunk: bytes) -> None:
            while self.session.waits(stream):
                self._moved.clear()
                await self._moved.wait()
            self.session.queue_bulk(stream, content_body(stream, chunk))
            self.pump()

        error = await read_offered(self._served.get(name), put)
        end = {"type": "fetch-end", "stream": stream, "error": error}
        self.session.queue_bulk(stream, message_body(OWN, end))
        del self._fetches[stream]
        self.pump()

    def end(self) -> None:
        """Stops the transfers of its files."""
        for fetch in self._fetches.values():
            fetch.cancel()
        self._fetches.clear()
        self._uploads.abandon()


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
        self._transport.set_write_buffer_limits(high=frames.WRITE_AHEAD)
        with contextlib.suppress(OSError):
            tune(self._transport.get_extra_info("socket"))
        self._server.on_made(self)
        self._write(frames.pack(b"J" + frames.dump({"type": "challenge", "nonce": self._nonce})))

    def data_received(self, data: bytes) -> None:
        """Handles every complete frame, then sends what is due."""
        now = time.monotonic()
        if self.peer is not None:
            self.peer.received_at = now
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
            while size < frames.WRITE_AHEAD and (body := session.next()) is not None:
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
