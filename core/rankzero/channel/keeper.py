"""`Keeper`: the channel's thread of an agent, which keeps its session with the driver across broken connections.

It connects with a proof of the run's secret in both directions. Standard library only: this module travels to
executors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rankzero import bounds
from rankzero.channel import auth, frames
from rankzero.channel.auth import Handshake, Hello
from rankzero.channel.exchange import Exchange
from rankzero.channel.frames import Decoder, FrameError, Message, Sealer
from rankzero.channel.session import ACK, CONTENT, CONTROL, OWN, message_body, split_content
from rankzero.host.network import Wait, tune

if TYPE_CHECKING:
    from rankzero.channel.tls import TlsSocket

Address = tuple[int, Any]
"""Family and address of a socket."""


class RefusedError(ConnectionError):
    """The driver has proved the secret and refuses this agent."""


@dataclass
class Link:
    """A connection on which both ends have proved the secret."""

    socket: socket.socket | TlsSocket
    decoder: Decoder
    sealer: Sealer
    received: int
    """Number of this agent's frames that the driver has received."""


def addresses(host: str, port: int) -> list[Address]:
    """Returns every address of a host, IPv4 and IPv6. Raises OSError if its name does not resolve."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no host name: {error}") from None
    return [(info[0], info[4]) for info in infos]


def dial(address: Address, secret: str, hello: Hello, wait: Wait, certificate: bytes | None = None) -> Link:
    """Connects to one address and performs the handshake.

    Args:
        address: An address that may be the driver's.
        secret: The run's secret, hex.
        hello: The facts that the agent reports about itself.
        wait: Waits for the socket.
        certificate: The driver's certificate for an encrypted connection; None for a plain one.

    Raises:
        RefusedError: The driver refuses this agent.
        OSError: The address cannot be reached in time, or the connection was closed.
        FrameError: The process at that address is not the driver.
    """
    plain = socket.socket(address[0], socket.SOCK_STREAM)
    connection: socket.socket | TlsSocket = plain
    try:
        plain.setblocking(False)
        _connect(plain, address[1], wait)
        tune(plain)
        if certificate is not None:
            # Imported here, because loading the TLS library takes time that plain connections need not spend.
            from rankzero.channel.tls import encrypt

            connection = encrypt(plain, certificate, wait)
        return _shake_hands(connection, secret, hello, wait)
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, address: Any, wait: Wait) -> None:
    problem = connection.connect_ex(address)
    if problem == errno.EINPROGRESS:
        wait(connection, selectors.EVENT_WRITE, time.monotonic() + bounds.CONNECT_TRY_TIMEOUT())
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def _shake_hands(connection: socket.socket | TlsSocket, secret: str, hello: Hello, wait: Wait) -> Link:
    deadline = time.monotonic() + bounds.HANDSHAKE_REPLY_TIMEOUT()
    decoder = Decoder()

    def receive() -> Message:
        while (body := decoder.next_body()) is None:
            wait(connection, selectors.EVENT_READ, deadline)
            try:
                data = connection.recv(frames.MAX_HANDSHAKE_FRAME)
            except BlockingIOError:
                # Only a part of an encrypted record has arrived.
                continue
            if not data:
                raise ConnectionResetError("the connection was closed during the handshake")
            decoder.feed(data)
        return frames.parse(body[1:])

    challenge = receive()
    if challenge["type"] != "challenge":
        raise FrameError("the peer did not send a challenge")
    handshake = Handshake(secret, challenge.get("nonce"), auth.new_nonce())
    # The buffer of a new socket has room for the whole frame.
    connection.sendall(frames.pack(b"J" + frames.dump(handshake.answer(hello))))
    verdict = receive()
    handshake.check_verdict(verdict)
    if verdict["type"] == "refused":
        raise RefusedError(verdict["reason"])
    ours, theirs = handshake.sealers()
    decoder.trust(theirs)
    return Link(connection, decoder, ours, verdict["received"])


class _OverError(Exception):
    """The session has ended; the text of the error is the reason."""


class Keeper:
    """Connects to the driver, exchanges frames, and reconnects, until an end disconnects or is lost."""

    def __init__(
        self,
        exchange: Exchange,
        hosts: Sequence[str],
        port: int,
        secret: str,
        task: int,
        connect_timeout: float,
        certificate: bytes | None = None,
        driver_lives: Callable[[], bool] = lambda: False,
    ) -> None:
        """Stores the arguments of `ChannelClient`."""
        self._exchange = exchange
        self._hosts = list(hosts)
        self._port = port
        self._secret = secret
        self._task = task
        self._connect_timeout = connect_timeout
        self._certificate = certificate
        self._driver_lives = driver_lives
        self._name = auth.new_nonce()
        self._address: Address | None = None
        self._tries = 0
        self._problems: dict[str, str] = {}
        self._received_at = 0.0
        self._has_disconnected = False

    def run(self) -> None:
        """Runs the thread until the session has ended."""
        self._started = time.monotonic()
        try:
            self._keep_session()
        except _OverError as over:
            self._exchange.end(str(over))
        except Exception as error:
            # The agent must learn that this thread has ended.
            self._exchange.end(f"the channel failed: {type(error).__name__}: {error}")

    def _keep_session(self) -> NoReturn:
        pause = 0.0
        while True:
            self._pause(pause)
            pause = min(bounds.CONNECT_PAUSE_MAX, max(bounds.CONNECT_PAUSE_MIN, 2 * pause))
            link = self._find_driver()
            if link is None:
                continue
            connected = time.monotonic()
            # Whatever broke the connection, the session continues on the next one.
            with contextlib.closing(link.socket), contextlib.suppress(OSError):
                self._talk(link)
            if time.monotonic() - connected > bounds.CONNECT_PAUSE_MAX:
                pause = 0.0

    def _pause(self, seconds: float) -> None:
        # A random share of the pause, so that all agents do not reconnect in the same moment.
        until = time.monotonic() + seconds * random.uniform(0.5, 1.0)
        with contextlib.suppress(TimeoutError):
            self._wait(None, 0, until)

    def _wait(self, connection: socket.socket | TlsSocket | None, event: int, deadline: float) -> None:
        """Waits until the socket is ready. Raises TimeoutError at the deadline, _OverError when the session ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._exchange.woken, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection, event)
            while True:
                self._check_end()
                timeout = min(deadline, self._exchange.give_up_at) - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, timeout))]
                if connection in ready:
                    return
                if ready:
                    self._exchange.woke()
                if time.monotonic() >= deadline:
                    raise TimeoutError("no answer in time")

    def _check_end(self) -> None:
        if not self._exchange.is_closing:
            return
        if time.monotonic() >= self._exchange.give_up_at:
            raise _OverError("the agent closed the channel before the driver had everything")
        if not self._received_at and self._exchange.is_idle:
            raise _OverError("the agent closed the channel")

    # -- finding the driver --------------------------------------------------------------------

    def _find_driver(self) -> Link | None:
        """Tries every address once. Raises _OverError when the driver is lost for good."""
        # The driver does not move, and a lost network may take the name resolver with it.
        for host in self._hosts if self._address is None else [self._address[1][0]]:
            try:
                candidates = [self._address] if self._address else addresses(host, self._port)
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
            self._check_time()
        return None

    def _dial(self, address: Address) -> Link:
        self._tries += 1
        hello = Hello(self._task, self._name, self._tries, self._exchange.session.received, self._received_at > 0)
        link = dial(address, self._secret, hello, self._wait, self._certificate)
        try:
            self._exchange.resume(link.received)
        except FrameError as error:
            link.socket.close()
            raise _OverError(f"the driver broke the channel's rules: {error}") from None
        self._address, self._received_at = address, time.monotonic()
        self._problems.clear()
        return link

    def _check_time(self) -> None:
        now, problems = time.monotonic(), "; ".join(f"{host}: {what}" for host, what in self._problems.items())
        if not self._received_at and now - self._started >= self._connect_timeout:
            text = f"no driver was found on port {self._port} within {self._connect_timeout:g} s: {problems}"
            raise _OverError(text)
        if self._received_at and now - self._received_at >= bounds.CONNECTION_LOST_AFTER() and not self._driver_lives():
            text = f"nothing was received from the driver for {bounds.CONNECTION_LOST_AFTER():g} s: {problems}"
            raise _OverError(text)

    # -- one connection ------------------------------------------------------------------------

    def _talk(self, link: Link) -> None:
        """Sends and receives until the connection breaks; raises _OverError when the session ends."""
        unsent = bytearray()
        pinged = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._exchange.woken, selectors.EVENT_READ)
            key = selector.register(link.socket, selectors.EVENT_READ)
            # Frames behind the driver's welcome may have been read together with it.
            is_whole = self._take_frames(link)
            while is_whole:
                self._send(link, unsent)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                if key.events != events:
                    key = selector.modify(link.socket, events)
                until = min(
                    pinged + bounds.PING_INTERVAL,
                    self._received_at + bounds.CONNECTION_SILENCE(),
                    self._exchange.give_up_at,
                )
                for ready, mask in selector.select(max(0.0, until - time.monotonic())):
                    if ready.fileobj is not link.socket:
                        self._exchange.woke()
                    elif mask & selectors.EVENT_READ:
                        is_whole = self._receive(link)
                self._check_end()
                now = time.monotonic()
                if now - self._received_at >= bounds.CONNECTION_SILENCE():
                    return
                if now - pinged >= bounds.PING_INTERVAL:
                    pinged = now
                    self._exchange.ping()

    def _send(self, link: Link, unsent: bytearray) -> None:
        while True:
            while len(unsent) < frames.WRITE_AHEAD and (body := self._next_body()) is not None:
                unsent += frames.pack(body, link.sealer)
            if not unsent:
                return
            try:
                del unsent[: link.socket.send(unsent)]
            except BlockingIOError:
                return

    def _next_body(self) -> bytes | None:
        body = self._exchange.next_body()
        if body is None and self._exchange.is_closing and not self._has_disconnected and self._exchange.is_idle:
            self._has_disconnected = True
            self._exchange.queue(message_body(OWN, {"type": "farewell"}))
            body = self._exchange.next_body()
        return body

    def _receive(self, link: Link) -> bool:
        """Reads once from the socket; returns False at the end of the connection."""
        try:
            data = link.socket.recv(frames.READ_SIZE)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._received_at = time.monotonic()
        link.decoder.feed(data)
        return self._take_frames(link)

    def _take_frames(self, link: Link) -> bool:
        """Handles every complete frame; returns False if the connection was tampered with."""
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
            raise _OverError(
                "the agent closed the channel" if self._has_disconnected else "the driver closed the channel"
            )
        if message["type"] == "fetch-end":
            fetch = self._exchange.fetch_of(message.get("stream"))
            self._exchange.end_fetch(message["stream"])
            self._exchange.deliver(fetch.finish(message.get("error")))
