"""The channel's thread of an agent: keeps its session with the driver over any number of cuts.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rankzero.channel import auth, frames, limits
from rankzero.channel.agent_end import dial
from rankzero.channel.agent_end.dial import Address, Link, RefusedError
from rankzero.channel.agent_end.exchange import Exchange
from rankzero.channel.auth import Hello
from rankzero.channel.frames import FrameError, Message
from rankzero.channel.session import ACK, CONTENT, CONTROL, OWN, message_body, split_content

if TYPE_CHECKING:
    from rankzero.channel.agent_end.tls import TlsSocket


class _OverError(Exception):
    """The session has ended; the text is the reason."""


class Keeper:
    """Finds the driver, talks to it, and finds it again, until one of both sends a farewell or is lost."""

    def __init__(
        self,
        exchange: Exchange,
        hosts: Sequence[str],
        port: int,
        secret: str,
        task: int,
        patience: float,
        certificate: bytes | None = None,
        driver_lives: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes what `ChannelClient` was given."""
        self._exchange = exchange
        self._hosts = list(hosts)
        self._port = port
        self._secret = secret
        self._task = task
        self._patience = patience
        self._certificate = certificate
        self._driver_lives = driver_lives
        self._name = auth.new_nonce()
        self._address: Address | None = None
        self._tries = 0
        self._problems: dict[str, str] = {}
        self._heard = 0.0
        self._farewell_said = False

    def run(self) -> None:
        """The thread's whole life."""
        self._started = time.monotonic()
        try:
            self._keep_session()
        except _OverError as over:
            self._exchange.end(str(over))
        except Exception as error:
            # Nobody would notice that the thread has ended; the agent has to.
            self._exchange.end(f"the channel failed: {type(error).__name__}: {error}")

    def _keep_session(self) -> NoReturn:
        pause = 0.0
        while True:
            self._pause(pause)
            pause = min(limits.BACKOFF_MAX, max(limits.BACKOFF_MIN, 2 * pause))
            link = self._find_driver()
            if link is None:
                continue
            connected = time.monotonic()
            # Whatever broke the connection, the next one goes on where this one ended.
            with contextlib.closing(link.socket), contextlib.suppress(OSError):
                self._talk(link)
            if time.monotonic() - connected > limits.BACKOFF_MAX:
                pause = 0.0

    def _pause(self, seconds: float) -> None:
        # Not all at the same moment: after a driver's pause every agent comes back.
        until = time.monotonic() + seconds * random.uniform(0.5, 1.0)
        with contextlib.suppress(TimeoutError):
            self._wait(None, 0, until)

    def _wait(self, connection: socket.socket | TlsSocket | None, event: int, deadline: float) -> None:
        """Until the socket is ready; raises TimeoutError at the deadline, _OverError when it is time to go."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._exchange.woken, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection, event)
            while True:
                self._look_at_the_end()
                timeout = min(deadline, self._exchange.give_up_at) - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, timeout))]
                if connection in ready:
                    return
                if ready:
                    self._exchange.woke()
                if time.monotonic() >= deadline:
                    raise TimeoutError("no answer in time")

    def _look_at_the_end(self) -> None:
        if not self._exchange.is_closing:
            return
        if time.monotonic() >= self._exchange.give_up_at:
            raise _OverError("the agent closed the channel before the driver had everything")
        if not self._heard and self._exchange.is_idle:
            raise _OverError("the agent closed the channel")

    # -- finding the driver --------------------------------------------------------------------

    def _find_driver(self) -> Link | None:
        """Tries every address once. Raises _OverError when the driver is lost for good."""
        # Once found, the driver stays where it is, and a resolver may be lost with the network.
        for host in self._hosts if self._address is None else [self._address[1][0]]:
            try:
                candidates = [self._address] if self._address else dial.addresses(host, self._port)
            except OSError as error:
                candidates = []
                self._problems[host] = error.strerror or str(error)
            for address in candidates:
                try:
                    return self._dial(address)
                except RefusedError as error:
                    raise _OverError(f"the driver refused this agent: {error}") from None
                except (OSError, FrameError) as error:
                    self._problems[address[1][0]] = str(error)
            self._look_at_the_clock()
        return None

    def _dial(self, address: Address) -> Link:
        self._tries += 1
        hello = Hello(self._task, self._name, self._tries, self._exchange.received, self._heard > 0)
        link = dial.dial(address, self._secret, hello, self._wait, self._certificate)
        try:
            self._exchange.resume(link.received)
        except FrameError as error:
            link.socket.close()
            raise _OverError(f"the driver broke the channel's rules: {error}") from None
        self._address, self._heard = address, time.monotonic()
        self._problems.clear()
        return link

    def _look_at_the_clock(self) -> None:
        now, problems = time.monotonic(), "; ".join(f"{host}: {what}" for host, what in self._problems.items())
        if not self._heard and now - self._started >= self._patience:
            text = f"no driver was found on port {self._port} within {self._patience:g} s: {problems}"
            raise _OverError(text)
        if self._heard and now - self._heard >= limits.LOST_AFTER and not self._driver_lives():
            text = f"nothing was heard from the driver for {limits.LOST_AFTER:g} s: {problems}"
            raise _OverError(text)

    # -- one connection ------------------------------------------------------------------------

    def _talk(self, link: Link) -> None:
        """Sends and receives until the connection breaks; raises _OverError when the session ends."""
        unsent = bytearray()
        pinged = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._exchange.woken, selectors.EVENT_READ)
            key = selector.register(link.socket, selectors.EVENT_READ)
            # What the driver sent right behind its welcome has been read with it.
            is_whole = self._take_frames(link)
            while is_whole:
                self._send(link, unsent)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                if key.events != events:
                    key = selector.modify(link.socket, events)
                until = min(pinged + limits.PING_INTERVAL, self._heard + limits.SILENCE, self._exchange.give_up_at)
                for ready, mask in selector.select(max(0.0, until - time.monotonic())):
                    if ready.fileobj is not link.socket:
                        self._exchange.woke()
                    elif mask & selectors.EVENT_READ:
                        is_whole = self._receive(link)
                self._look_at_the_end()
                now = time.monotonic()
                if now - self._heard >= limits.SILENCE:
                    return
                if now - pinged >= limits.PING_INTERVAL:
                    pinged = now
                    self._exchange.ping()

    def _send(self, link: Link, unsent: bytearray) -> None:
        while True:
            while len(unsent) < limits.WRITE_AHEAD and (body := self._next_body()) is not None:
                unsent += frames.pack(body, link.sealer)
            if not unsent:
                return
            try:
                del unsent[: link.socket.send(unsent)]
            except BlockingIOError:
                return

    def _next_body(self) -> bytes | None:
        body = self._exchange.next_body()
        if body is None and self._exchange.is_closing and not self._farewell_said and self._exchange.is_idle:
            self._farewell_said = True
            self._exchange.queue(message_body(OWN, {"type": "farewell"}))
            body = self._exchange.next_body()
        return body

    def _receive(self, link: Link) -> bool:
        """Takes one read's worth; False at the end of the connection."""
        try:
            data = link.socket.recv(limits.READ_SIZE)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._heard = time.monotonic()
        link.decoder.feed(data)
        return self._take_frames(link)

    def _take_frames(self, link: Link) -> bool:
        """Acts on every whole frame; False if somebody has tampered with the connection."""
        while True:
            try:
                body = link.decoder.next_body()
            except FrameError:
                return False
            if body is None:
                return True
            try:
                self._take(body)
            except FrameError as error:
                raise _OverError(f"the driver broke the channel's rules: {error}") from None

    def _take(self, body: bytes) -> None:
        kind = self._exchange.take(body)
        if kind == CONTROL:
            self._exchange.deliver(frames.parse(body[1:]))
        elif kind == CONTENT:
            stream, data = split_content(body)
            self._exchange.fetch_of(stream).write(data)
            self._exchange.grant(len(body))
        elif kind == OWN:
            self._take_own(frames.parse(body[1:]))
        elif kind != ACK:
            raise FrameError("a bulk message from the driver")

    def _take_own(self, message: Message) -> None:
        if message["type"] == "farewell":
            raise _OverError("the agent closed the channel" if self._farewell_said else "the driver closed the channel")
        if message["type"] == "fetch-end":
            fetch = self._exchange.fetch_of(message.get("stream"))
            self._exchange.end_fetch(message["stream"])
            self._exchange.deliver(fetch.finish(message.get("error")))
