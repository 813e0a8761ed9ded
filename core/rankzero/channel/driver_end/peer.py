"""`Peer`: the driver's side of one agent's session, with its current connection, if any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from rankzero.channel import limits
from rankzero.channel.driver_end.files import Uploads, read_offered
from rankzero.channel.frames import FrameError, Message, parse
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

logger = logging.getLogger(__name__)

OnMessage = Callable[[int, Message], None]


class Line(Protocol):
    """The methods of a connection that a peer calls."""

    reason: str

    def send(self, session: Session) -> None:
        """Writes the session's next frames, as far as the socket takes them."""

    def drop(self, reason: str) -> None:
        """Closes the connection immediately."""


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
        self.session = Session(limits.FETCH_WINDOW, limits.BULK_WINDOW)
        self.connection: Line | None = None
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
            self._take_own(parse(body[1:]))

    def _take_message(self, body: bytes) -> None:
        message = parse(body[1:])
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
